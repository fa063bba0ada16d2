use super::*;
use serde_json::json;

fn template(source: &str) -> Template {
    Template(ChatTemplate::parse(source.into(), Map::new(), Path::new("t.jinja")).expect("a template"))
}

fn say(role: &str, content: &str) -> Value {
    json!({ "role": role, "content": content })
}

fn learned(rendered: &Rendered) -> Vec<&str> {
    rendered.learned.iter().map(|range| &rendered.text[range.clone()]).collect()
}

#[test]
fn generation_blocks_say_what_is_learned_and_trim_white_space_as_blocks_do() {
    let source = "\
{% for m in messages %}
    {% if m.role == 'assistant' %}
A:
    {%- generation -%}
    {{ m.content }}.
    {%- endgeneration %}

    {% else %}
U: {{ m.content }}
    {% endif %}
{% endfor %}
";
    let messages = [say("user", "hi"), say("assistant", "yo"), say("assistant", "é")];
    let rendered = template(source).render(&messages, &Value::Null).expect("text");
    assert_eq!(rendered.text, "U: hi\nA:yo.\nA:é.\n");
    assert_eq!(learned(&rendered), ["yo.", "é."]);
    // A generation block keeps its white space, and begins a line.
    let source = "{% for m in messages %}\n  {% generation %}\n{{ m.content }}\n  {% endgeneration %}\n|{% endfor %}";
    let rendered = template(source).render(&messages[1..2], &Value::Null).expect("text");
    assert_eq!((rendered.text.as_str(), learned(&rendered)), ("yo\n|", vec!["yo\n"]));
}

#[test]
fn without_blocks_the_answer_is_what_follows_the_prompt() {
    let source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}\
                  {% if add_generation_prompt %}<assistant>{% endif %}";
    let messages = [say("user", "a"), say("assistant", "b"), say("user", "c"), say("assistant", "d"), say("user", "e")];
    let rendered = template(source).render(&messages, &Value::Null).expect("text");
    assert_eq!(learned(&rendered), ["b</s>", "d</s>"]);
    assert_eq!(rendered.text, "<user>a</s><assistant>b</s><user>c</s><assistant>d</s><user>e</s>");
}

/// A template like Qwen3's, which writes thoughts, even empty ones, in the last answer only.
const THINKS_LAST: &str = "{% for m in messages %}<{{ m.role }}>\
    {% if m.role == 'assistant' %}{% set words = m.content.split('</think>')[-1] %}\
    {% if loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ words.strip() }}\
    {% for call in m.tool_calls or [] %}[{{ call.function.name }} {{ call.function.arguments | tojson }}]{% endfor %}\
    {% else %}{{ m.content }}{% endif %}</s>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";

#[test]
fn an_answer_that_is_written_differently_when_more_follows_is_found_in_the_whole() {
    let learned_of = |messages: &[Value]| {
        let rendered = template(THINKS_LAST).render(messages, &Value::Null).expect("text");
        learned(&rendered).into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    let turns = [say("user", "a"), say("assistant", " b "), say("user", "b <think>"), say("assistant", "b")];
    assert_eq!(learned_of(&turns), ["b</s>\n", "<think></think>b</s>\n"]);
    assert_eq!(learned_of(&turns[..3]), ["b</s>\n"]);
    // The thoughts of an early answer are in the data, but not in the rendered text.
    let thought = [say("user", "a"), say("assistant", "<think>hm</think>é"), say("user", "c"), say("assistant", "é")];
    assert_eq!(learned_of(&thought), ["é</s>\n", "<think></think>é</s>\n"]);
    let mut told = turns.clone();
    told[1]["reasoning_content"] = "hm".into();
    told[3]["reasoning_content"] = "<assistant>b".into();
    assert_eq!(learned_of(&told), ["b</s>\n", "<think><assistant>b</think>b</s>\n"]);
    let mut calls = turns.clone();
    calls[1] = json!({"role": "assistant", "content": "", "tool_calls": [
        {"function": {"name": "f", "arguments": {"x": 1}}}, {"function": {"name": "g", "arguments": {}}}]});
    assert_eq!(learned_of(&calls), ["[f {\"x\": 1}][g {}]</s>\n", "<think></think>b</s>\n"]);
    let mut silent = turns.clone();
    silent[1] = say("assistant", "");
    assert_eq!(learned_of(&silent), ["</s>\n", "<think></think>b</s>\n"]);
    let first = [say("assistant", "hello"), say("user", "a"), say("assistant", "b")];
    assert_eq!(learned_of(&first), ["hello</s>\n", "<think></think>b</s>\n"]);
}

#[test]
fn words_that_change_what_stands_around_them_are_refused() {
    for source in [
        // The text that closes a message depends on what follows.
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ '</s>' if loop.last else '|' }}{% endfor %}",
        // The words occur a second time after the answer.
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}{{ messages[1].content if messages | length > 1 }}",
        "{{ messages | length }}{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}{{ messages[1].content if messages | length > 1 }}",
    ] {
        let messages = [say("user", "a"), say("assistant", "b"), say("user", "c")];
        let message = template(source).render(&messages, &Value::Null).expect_err(source);
        assert!(message.contains("message 2"), "{message}");
    }
}

#[test]
fn a_template_that_rewrites_what_came_before_is_refused() {
    let source = "{% for m in messages %}{{ m.content if loop.last else '(...)' }}{% endfor %}";
    let messages = [say("user", "a"), say("assistant", "b"), say("user", "c")];
    let message = template(source).render(&messages, &Value::Null).expect_err("refused");
    assert!(message.contains("message 2") && message.contains("{% generation %}"), "{message}");
}

#[test]
fn errors_of_a_template_and_unsupported_features_are_reported() {
    let render = |source: &str| template(source).render(&[say("user", "a")], &Value::Null);
    let message = render("{{ raise_exception('no user') }}").expect_err("refused");
    assert!(message.contains("no user"), "{message}");
    let message = render("{{ messages[0].content.frobnicate() }}").expect_err("refused");
    assert!(message.contains("frobnicate"), "{message}");
    let broken = ChatTemplate::parse("{% if %}".into(), Map::new(), Path::new("t.jinja")).expect_err("refused");
    assert!(broken.to_string().contains("t.jinja"), "{broken}");
}

#[test]
fn json_is_written_as_python_writes_it() {
    let source = "{{ tools | tojson }}|{{ tools | tojson(indent=4) }}";
    let tools = json!([{"a": [1, 2.5, "<é'\">"], "b": {}, "c": null}]);
    let rendered = template(source).render(&[say("user", "x")], &tools).expect("text");
    let expected = "[{\"a\": [1, 2.5, \"<é'\\\">\"], \"b\": {}, \"c\": null}]|\
                    [\n    {\n        \"a\": [\n            1,\n            2.5,\n            \"<é'\\\">\"\n        ],\n        \
                    \"b\": {},\n        \"c\": null\n    }\n]";
    assert_eq!(rendered.text, expected);
}

#[test]
fn a_model_folder_has_its_template_in_one_of_three_places() {
    let folder = tempfile::tempdir().expect("folder");
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).expect("file");
    let text = || {
        let found = Template::from_model_folder(folder.path()).expect("readable");
        found.map(|template| template.render(&[say("user", "x")], &Value::Null).expect("text").text)
    };
    assert_eq!(text(), None);
    write("tokenizer_config.json", r#"{"bos_token": {"content": "<s>"}, "chat_template": "{{ bos_token }}1"}"#);
    assert_eq!(text(), Some("<s>1".into()));
    let several = r#"{"bos_token": "<b>", "chat_template": [{"name": "tools", "template": "2"},
        {"name": "default", "template": "{{ bos_token }}3"}]}"#;
    write("tokenizer_config.json", several);
    assert_eq!(text(), Some("<b>3".into()));
    write("chat_template.jinja", "{{ bos_token }}4");
    assert_eq!(text(), Some("<b>4".into()));
    write("tokenizer_config.json", "{");
    let message = Template::from_model_folder(folder.path()).expect_err("damaged").to_string();
    assert!(message.contains("tokenizer_config.json"), "{message}");
}
