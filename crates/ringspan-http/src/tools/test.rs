use super::*;
use serde_json::json;

/// The tools that the texts below call.
fn tools() -> Vec<Value> {
    let function = |name: &str, properties: Value| {
        json!({"type": "function", "function": {"name": name, "description": "", "parameters":
            {"type": "object", "properties": properties}}})
    };
    vec![
        function(
            "weather",
            json!({"place": {"type": "string"}, "days": {"type": "integer"}, "units": {"type": "array"}}),
        ),
        function("time", json!({"zone": {"type": "string"}})),
    ]
}

/// The parts of a text that arrives in pieces of so many characters; neighbouring texts are joined.
fn parse_in_pieces(mode: ToolMode, text: &str, piece: usize) -> Vec<Parsed> {
    let mut parser = ToolParser::new(mode, usize::MAX, &Definitions::new(&tools()));
    let characters: Vec<char> = text.chars().collect();
    let mut parts = Vec::new();
    for piece in characters.chunks(piece) {
        parts.extend(parser.push(&piece.iter().collect::<String>()));
    }
    parts.extend(parser.finish());
    let mut all: Vec<Parsed> = Vec::new();
    for part in parts {
        match (all.last_mut(), part) {
            (Some(Parsed::Text(text)), Parsed::Text(more)) => text.push_str(&more),
            (Some(Parsed::Reasoning(text)), Parsed::Reasoning(more)) => text.push_str(&more),
            (_, part) => all.push(part),
        }
    }
    all
}

/// The parts of a text, which must not depend on how it is cut.
fn parse(mode: ToolMode, text: &str) -> Vec<Parsed> {
    let whole = parse_in_pieces(mode.clone(), text, usize::MAX);
    for piece in [1, 2, 3, 7] {
        assert_eq!(parse_in_pieces(mode.clone(), text, piece), whole, "in pieces of {piece}: {text}");
    }
    whole
}

fn auto(format: ToolFormat, text: &str) -> Vec<Parsed> {
    parse(ToolMode::Auto(format), text)
}

fn called(name: &str, arguments: &str) -> Parsed {
    Parsed::Call(ToolCall { name: name.into(), arguments: arguments.into() })
}

fn text(text: &str) -> Parsed {
    Parsed::Text(text.into())
}

fn reasoning(text: &str) -> Parsed {
    Parsed::Reasoning(text.into())
}

#[test]
fn hermes_calls_stand_between_tags() {
    let two = "Let me see.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call>\n<tool_call>\n\
               {\"name\": \"g\", \"arguments\": {}}\n</tool_call>\n";
    let calls = [text("Let me see."), called("f", "{\"x\":1}"), called("g", "{}")];
    assert_eq!(auto(ToolFormat::Hermes, two), calls);
    for plain in ["a < b <tool", " \n ", "one\n\ntwo\n", "<tool_call>{\"name\": </tool_call> no", "x \n<tool_call>1"] {
        assert_eq!(auto(ToolFormat::Hermes, plain), [text(plain)]);
    }
    let unfinished = "<tool_call>{\"name\": \"f\"}";
    assert_eq!(auto(ToolFormat::Hermes, unfinished), [called("f", "{}")], "the end is missing");
    let between = "<tool_call>{\"name\": \"f\"}</tool_call> and <tool_call>{\"name\": \"g\"}</tool_call> then";
    let parts = [called("f", "{}"), text(" and"), called("g", "{}"), text(" then")];
    assert_eq!(auto(ToolFormat::Hermes, between), parts);
}

#[test]
fn mistral_writes_lists_or_names_with_arguments() {
    let list = "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"x\": [1]}}, {\"name\": \"g\", \"arguments\": {}}]";
    assert_eq!(auto(ToolFormat::Mistral, list), [called("f", "{\"x\":[1]}"), called("g", "{}")]);
    let named = "hm[TOOL_CALLS]f[ARGS]{\"x\": 1}[TOOL_CALLS]g[CALL_ID]abc123def[ARGS]{}";
    assert_eq!(auto(ToolFormat::Mistral, named), [text("hm"), called("f", "{\"x\": 1}"), called("g", "{}")]);
    for plain in ["[TOOL] box", "[TOOL_CALLS] none"] {
        assert_eq!(auto(ToolFormat::Mistral, plain), [text(plain)]);
    }
}

#[test]
fn llama_writes_a_call_or_a_text() {
    let call = "<|python_tag|>{\"name\": \"f\", \"parameters\": {\"x\": \"y\"}}; {\"name\": \"g\", \"parameters\": {}}";
    assert_eq!(auto(ToolFormat::Llama, call), [called("f", "{\"x\":\"y\"}"), called("g", "{}")]);
    for plain in ["{\"x\": 1}", "Hi {"] {
        assert_eq!(auto(ToolFormat::Llama, plain), [text(plain)]);
    }
}

#[test]
fn deepseek_writes_arguments_as_code_or_after_the_name() {
    let v3 = "I look.\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{\"place\": \"Ulm\"}\n```\
              <｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    let calls = [text("I look."), called("weather", "{\"place\": \"Ulm\"}"), called("time", "{}")];
    assert_eq!(auto(ToolFormat::DeepSeek, v3), calls);
    let v31 = "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{\"place\": \"Ulm\"}<｜tool▁call▁end｜>\
               <｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    assert_eq!(auto(ToolFormat::DeepSeek, v31), calls);
    // Arguments may contain what looks like the other form.
    let code = "<｜tool▁call▁begin｜>run<｜tool▁sep｜>{\"code\": \"a\\n```b```\"}<｜tool▁call▁end｜>";
    assert_eq!(auto(ToolFormat::DeepSeek, code), [called("run", "{\"code\": \"a\\n```b```\"}")]);
    for plain in ["a <｜tool", "<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{\"place\": <｜tool▁call▁end｜>"]
    {
        assert_eq!(auto(ToolFormat::DeepSeek, plain), [text(plain)]);
    }
}

#[test]
fn glm4_writes_the_name_of_a_tool_on_a_line_of_its_own() {
    let one = "weather\n{\"place\": \"Ulm\"}";
    assert_eq!(auto(ToolFormat::Glm4, one), [called("weather", "{\"place\": \"Ulm\"}")]);
    let more = "\nI look.<|assistant|>weather\n{\"place\": \"Ulm\"}<|assistant|>time \n{}";
    let calls = [text("\nI look."), called("weather", "{\"place\": \"Ulm\"}"), called("time", "{}")];
    assert_eq!(auto(ToolFormat::Glm4, more), calls);
    // What is no tool of the request is text, and so are words that begin like a tool's name.
    for plain in
        ["Hello\n{\"a\": 1}", "weather is fine", "weather", "weather\nis fine", "weather\n{\"a\": ", "time\n\n"]
    {
        assert_eq!(auto(ToolFormat::Glm4, plain), [text(plain)]);
    }
}

#[test]
fn glm45_writes_a_pair_of_tags_for_each_argument() {
    let calls = "I look.\n<tool_call>weather\n<arg_key>place</arg_key>\n<arg_value>12</arg_value>\n<arg_key>days</arg_key>\n\
                 <arg_value>3</arg_value>\n<arg_key>units</arg_key>\n<arg_value>[\"C\"]</arg_value>\n</tool_call>\n<tool_call>time\n\
                 </tool_call>";
    let weather = called("weather", "{\"place\":\"12\",\"days\":3,\"units\":[\"C\"]}");
    assert_eq!(auto(ToolFormat::Glm45, calls), [text("I look."), weather, called("time", "{}")]);
    let dense = "<tool_call>time<arg_key>zone</arg_key><arg_value> a\nb </arg_value></tool_call>";
    assert_eq!(auto(ToolFormat::Glm45, dense), [called("time", "{\"zone\":\" a\\nb \"}")]);
    for plain in ["<tool_call>time<arg_key>zone</arg_key></tool_call>", "<tool_call>two words</tool_call>"] {
        assert_eq!(auto(ToolFormat::Glm45, plain), [text(plain)]);
    }
}

#[test]
fn qwen_coder_writes_names_into_tags() {
    let calls = "I look.\n<tool_call>\n<function=weather>\n<parameter=place>\nUlm\n\nor Bonn\n</parameter>\n<parameter=days>\n3\n\
                 </parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=time>\n</function>\n</tool_call>";
    let weather = called("weather", "{\"place\":\"Ulm\\n\\nor Bonn\",\"days\":3}");
    assert_eq!(auto(ToolFormat::QwenCoder, calls), [text("I look."), weather, called("time", "{}")]);
    let plain = "<tool_call>\n<function=weather>\n<parameter=place>\n</tool_call>";
    assert_eq!(auto(ToolFormat::QwenCoder, plain), [text(plain)]);
}

#[test]
fn harmony_has_channels_for_reasoning_and_answers() {
    let both =
        "<|channel|>analysis<|message|>A greeting.<|end|><|start|>assistant<|channel|>final<|message|>Hello <b>!";
    let parts = [reasoning("A greeting."), text("Hello <b>!")];
    assert_eq!(auto(ToolFormat::Harmony, both), parts);
    assert_eq!(parse(ToolMode::Channels, both), parts, "without tools");
    let more = "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|end|>\
                <|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|>Done.\
                <|return|>";
    assert_eq!(auto(ToolFormat::Harmony, more), [reasoning("One.\nTwo."), text("I look.\nDone.")]);
    // A grammar leaves no room for channels, and a prompt may end within a message.
    for plain in ["{\"a\": \"<|\"}", "and so on.", "to"] {
        assert_eq!(auto(ToolFormat::Harmony, plain), [text(plain)]);
    }
    let cut = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assist";
    assert_eq!(auto(ToolFormat::Harmony, cut), [reasoning("Hm.")], "a header that was cut off is no text");
}

#[test]
fn harmony_calls_name_the_function_before_or_after_the_channel() {
    let thought = "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant";
    for header in [
        "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.weather<|constrain|>json<|message|>",
        " to=functions.weather<|channel|>commentary json<|message|>",
        " to=functions.weather<|channel|>analysis <|constrain|>json<|message|>",
        "<|channel|>commentary to=weather <|message|>",
    ] {
        // `<|call|>` ends the text, and so is usually not part of it.
        for end in ["", "<|call|>"] {
            let said = format!("{thought}{header}{{\"place\": \"Ulm\"}}{end}");
            let parts = [reasoning("Look it up."), called("weather", "{\"place\": \"Ulm\"}")];
            assert_eq!(auto(ToolFormat::Harmony, &said), parts, "{said}");
        }
        let first = format!("{header}{{\"days\": 1}}");
        assert_eq!(auto(ToolFormat::Harmony, &first), [called("weather", "{\"days\": 1}")], "{first}");
    }
    let unasked = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{}";
    assert_eq!(parse(ToolMode::Channels, unasked), [text("{}")], "nobody would answer the call");
    let built_in = "<|channel|>analysis to=python code<|message|>1 + 1<|call|>";
    assert_eq!(auto(ToolFormat::Harmony, built_in), [reasoning("1 + 1")]);
    let broken = "<|channel|>commentary to=functions.weather json<|message|>{\"place\": ";
    assert_eq!(auto(ToolFormat::Harmony, broken), [text("{\"place\": ")]);
}

#[test]
fn granite_writes_a_list_after_its_mark() {
    let list =
        "[{\"name\": \"weather\", \"arguments\": {\"place\": \"Ulm\"}}, {\"name\": \"time\", \"arguments\": {}}]";
    let calls = [called("weather", "{\"place\":\"Ulm\"}"), called("time", "{}")];
    for said in
        [format!("<|tool_call|>{list}"), format!("<tool_call> {list}"), format!("<tool_call>{list}</tool_call>")]
    {
        assert_eq!(auto(ToolFormat::Granite, &said), calls, "{said}");
    }
    let one = "I look. <|tool_call|>{\"name\": \"time\", \"arguments\": {}}\n";
    assert_eq!(auto(ToolFormat::Granite, one), [text("I look."), called("time", "{}")]);
    for plain in ["<|tool_call|>[]", "<|tool_call|> none", "a <|tool"] {
        assert_eq!(auto(ToolFormat::Granite, plain), [text(plain)]);
    }
}

#[test]
fn phi4_writes_calls_between_marks_or_after_a_word() {
    let list =
        "[{\"name\": \"weather\", \"arguments\": {\"units\": [\"C\"]}}, {\"name\": \"time\", \"arguments\": {}}]";
    let calls = [called("weather", "{\"units\":[\"C\"]}"), called("time", "{}")];
    for said in
        [format!("<|tool_call|>{list}<|/tool_call|>"), format!("functools{list}"), format!("<|tool_call|>{list}")]
    {
        assert_eq!(auto(ToolFormat::Phi4, &said), calls, "{said}");
    }
    let apart = "Well.<|tool_call|>{\"name\": \"f\"}<|/tool_call|><|tool_call|>{\"name\": \"g\"}<|/tool_call|>";
    assert_eq!(auto(ToolFormat::Phi4, apart), [text("Well."), called("f", "{}"), called("g", "{}")]);
    for plain in ["Python has functools.", "functools[0]"] {
        assert_eq!(auto(ToolFormat::Phi4, plain), [text(plain)]);
    }
}

#[test]
fn grammars_make_calls_of_whole_texts() {
    assert_eq!(parse(ToolMode::Named("f".into()), "{\"x\":1}"), [called("f", "{\"x\":1}")]);
    let list = "[{\"name\": \"f\", \"parameters\": {}}]";
    assert_eq!(parse(ToolMode::Required, list), [called("f", "{}")]);
    assert_eq!(parse(ToolMode::None, "<tool_call>"), [text("<tool_call>")]);
}

#[test]
fn calls_beyond_the_number_asked_for_are_dropped() {
    let none = Definitions::default();
    let mut parser = ToolParser::new(ToolMode::Required, 1, &none);
    parser.push("[{\"name\": \"f\"}, {\"name\": \"g\"}]");
    assert_eq!(parser.finish(), [called("f", "{}")]);
    let mut parser = ToolParser::new(ToolMode::Auto(ToolFormat::Hermes), 1, &none);
    let call = "<tool_call>{\"name\": \"f\"}</tool_call>";
    assert_eq!(parser.push(call), [called("f", "{}")]);
    assert_eq!(parser.push(call), []);
}

/// Parts of templates in the shape of the real ones: what tells the model, or writes an earlier call.
const EXCERPTS: [(&str, &str, Option<ToolFormat>); 16] = [
    (
        "Qwen 2.5",
        "{%- if tools %}{{- '<tools>' }}{{- '</tools> For each call, return <tool_call>{\"name\": <function-name>, \
         \"arguments\": <args-json-object>}</tool_call>' }}{%- endif %}",
        Some(ToolFormat::Hermes),
    ),
    (
        "Granite 4",
        "{%- set suffix = 'within <tool_call></tool_call> tags' %}{%- if tools %}{{- '<|start_of_role|>system<|end_of_role|>' + suffix \
         }}{%- endif %}",
        Some(ToolFormat::Hermes),
    ),
    (
        "Qwen3-Coder",
        "{%- if tools %}{{- '<tool_call>\\n<function=example>\\n<parameter=p>\\nvalue\\n</parameter>' }}{%- endif %}",
        Some(ToolFormat::QwenCoder),
    ),
    (
        "GLM-4.5",
        "[gMASK]<sop>{%- if tools %}<|system|><tool_call>{function-name}\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n\
         </tool_call>{%- endif %}{%- set content = m.metadata %}<|observation|><tool_response>",
        Some(ToolFormat::Glm45),
    ),
    (
        "GLM-4-0414",
        "[gMASK]<sop>{%- if tools %}<|system|>{{ function | tojson(indent=4, ensure_ascii=False) }}{%- endif %}\
         {%- set meta = message.get(\"metadata\", \"\") %}{%- if role == 'observation' %}<|observation|>{%- endif %}",
        Some(ToolFormat::Glm4),
    ),
    (
        "GLM-4-9B",
        "[gMASK]<sop>{% for item in messages %}{% if item['tools'] is defined %}<|system|>{% endif %}<|{{ item['role'] }}|>\
         {{ item['metadata'] }}\n{{ item['content'] }}{% endfor %}",
        Some(ToolFormat::Glm4),
    ),
    (
        "Mistral Small 3.1",
        "{%- if tools %}{{- '[AVAILABLE_TOOLS]' }}{%- endif %}{{- '[TOOL_CALLS][' }}",
        Some(ToolFormat::Mistral),
    ),
    (
        "Llama 3.2",
        "{%- if tools is not none %}{{- 'Environment: ipython' }}{{- '{\"name\": function name, \"parameters\": dictionary}' }}\
         {%- endif %}{{- '<|start_header_id|>assistant<|end_header_id|>' }}{{- '\"parameters\": ' }}",
        Some(ToolFormat::Llama),
    ),
    (
        "DeepSeek-V3",
        "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\\n```json\\n' }}",
        Some(ToolFormat::DeepSeek),
    ),
    (
        "DeepSeek-R1-Distill-Llama",
        "{% if tools %}<|python_tag|>{% endif %}{{ '<｜tool▁call▁begin｜>' + tool['function']['name'] + '<｜tool▁sep｜>' }}",
        Some(ToolFormat::DeepSeek),
    ),
    (
        "gpt-oss",
        "{%- if tools %}{{- '# Tools' }}{%- endif %}{{- '<|start|>assistant to=functions.' + tool_call.name + \
         '<|channel|>commentary json<|message|>' }}",
        Some(ToolFormat::Harmony),
    ),
    (
        "Granite 3.1",
        "{%- if tools %}{%- set system = 'respond with <|tool_call|> and a JSON list' %}{%- endif %}\
         {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' }}",
        Some(ToolFormat::Granite),
    ),
    (
        "Phi-4-mini",
        "{% if 'tools' in message %}{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}{% endif %}",
        Some(ToolFormat::Phi4),
    ),
    ("Gemma 3", "{{ '<start_of_turn>' + role + '\\n' + message['content'] }}", None),
    (
        "Command R, whose calls are a list of its own",
        "{% if tools %}{\"tool_name\": name, \"parameters\": {}}{% endif %}",
        None,
    ),
    (
        "Gemma 4, which has marks like these",
        "{%- if tools %}{{ '<|tool_call>call:' }}{{ '<tool_call|>' }}{%- endif %}",
        None,
    ),
];

#[test]
fn templates_tell_their_form() {
    for (name, template, format) in EXCERPTS {
        assert_eq!(ToolFormat::of(template), format, "{name}");
    }
}

/// A conversation in which a tool was called.
fn conversation() -> Vec<Value> {
    vec![
        json!({"role": "user", "content": "Weather?"}),
        json!({"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [{"id": "call_1", "type": "function",
            "function": {"name": "weather", "arguments": {"place": "Ulm"}}}]}),
        json!({"role": "tool", "tool_call_id": "call_1", "content": "sunny"}),
    ]
}

#[test]
fn templates_without_calls_get_them_as_their_models_write_them() {
    let list = "[{\"name\":\"weather\",\"arguments\":{\"place\":\"Ulm\"}}]";
    let tools = Value::from(tools());
    let written = |format: ToolFormat, template: &str| {
        let messages = format.messages(template, &conversation(), &tools);
        messages.into_iter().map(|message| (message["role"].clone(), message["content"].clone())).collect::<Vec<_>>()
    };
    let user = (json!("user"), json!("Weather?"));
    let tool = (json!("tool"), json!("sunny"));

    let granite = written(ToolFormat::Granite, "{{ message['content'] }}");
    assert_eq!(granite, [user.clone(), (json!("assistant"), format!("<|tool_call|>{list}").into()), tool.clone()]);
    let older = written(ToolFormat::Granite, "{% if message['role'] == 'assistant_tool_call' %}");
    let response = (json!("tool_response"), json!("sunny"));
    assert_eq!(older, [user.clone(), (json!("assistant_tool_call"), list.into()), response.clone()]);

    let phi = "{% if 'tools' in message %}{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}{% endif %}{{ message['content'] }}";
    let call = (json!("assistant"), format!("<|tool_call|>{list}<|/tool_call|>").into());
    assert_eq!(written(ToolFormat::Phi4, phi), [(json!("system"), json!("")), user.clone(), call, response]);
    let system = ToolFormat::Phi4.messages(phi, &conversation(), &tools)[0]["tools"].clone();
    let functions: Value = serde_json::from_str(system.as_str().expect("a text")).expect("JSON");
    assert_eq!((functions[0]["name"].as_str(), functions[1]["name"].as_str()), (Some("weather"), Some("time")));

    let observed =
        [user.clone(), (json!("assistant"), json!("{\"place\":\"Ulm\"}")), (json!("observation"), json!("sunny"))];
    assert_eq!(written(ToolFormat::Glm4, "{{ message.get('metadata') }}"), observed);
    assert_eq!(ToolFormat::Glm4.messages("", &conversation(), &tools)[1]["metadata"], "weather");
    let with_tools = ToolFormat::Glm4.messages("{{ item['tools'] }}", &conversation(), &tools);
    assert_eq!((&with_tools[0]["role"], &with_tools[0]["tools"]), (&json!("system"), &tools));

    let deepseek = written(ToolFormat::DeepSeek, "");
    assert_eq!(deepseek, [user, (json!("assistant"), Value::Null), tool]);

    // A template that writes calls itself gets the conversation as it is.
    for format in [ToolFormat::Granite, ToolFormat::Phi4, ToolFormat::Glm4, ToolFormat::Mistral, ToolFormat::Hermes] {
        assert_eq!(format.messages("{{ message.tool_calls }}", &conversation(), &tools), conversation(), "{format:?}");
    }
}

#[test]
fn harmony_reads_what_was_thought_before_a_call() {
    let messages = ToolFormat::Harmony.messages("", &conversation(), &Value::Null);
    assert_eq!((&messages[1]["thinking"], messages[1].get("reasoning_content")), (&json!("Hm."), None));
    let without_calls = [json!({"role": "assistant", "content": "Hi", "tool_calls": []})];
    let messages = ToolFormat::Harmony.messages("", &without_calls, &Value::Null);
    assert_eq!(messages, [json!({"role": "assistant", "content": "Hi"})]);
}
