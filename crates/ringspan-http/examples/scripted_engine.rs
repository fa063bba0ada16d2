//! A server over a scripted engine, whose prompts contain the texts that it generates. So it needs no model, and every answer is
//! known. `tools/check_clients.py` runs clients against it. Its argument is a port; 0 takes any free one.

#[path = "../tests/it/engine.rs"]
mod engine;

use ringspan_http::{ServedModel, Server, Settings};
use ringspan_models::chat_template::ChatTemplate;
use serde_json::Map;
use std::path::Path;
use std::sync::Arc;

const TEMPLATE: &str = "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}<|user|>{{ m.role }}: \
    {{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\n\
    {% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let port = std::env::args().nth(1).map_or(Ok(0), |port| port.parse())?;
    let template = ChatTemplate::parse(TEMPLATE.into(), Map::new(), Path::new("scripted.jinja"))?;
    let model = ServedModel {
        engine: Arc::new(engine::TestEngine::default()),
        name: "scripted".into(),
        tokenizer: engine::tokenizer(),
        template: Some(template),
        end_tokens: vec![engine::END],
        generation_config: Map::new(),
    };
    let server = Server::bind(model, &Settings { port, ..Settings::default() })?;
    println!("listening on http://{}", server.address()?);
    server.run(|| false)?;
    Ok(())
}
