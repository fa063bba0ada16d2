//! A server with the test engine, and a client that writes HTTP by hand over a socket of its own.

use crate::engine::{END, TestEngine, tokenizer};
use ringspan_http::{ServedModel, Server, Settings};
use ringspan_models::chat_template::ChatTemplate;
use serde_json::{Map, Value, json};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use tokenizers::Tokenizer;

/// A template in the form of Qwen's, with tools.
pub(crate) const TEMPLATE: &str = "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}<|user|>{{ m.role }}: \
    {{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.arguments | tojson }}</tool_call>\
    {% endfor %}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}{% if enable_thinking %}{% endif %}";

pub(crate) struct Running {
    pub(crate) address: SocketAddr,
    pub(crate) engine: Arc<TestEngine>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<bool>>,
}

/// A response: status, headers in lower case, body.
#[derive(Debug)]
pub(crate) struct HttpResponse {
    pub(crate) status: u16,
    pub(crate) headers: String,
    pub(crate) body: String,
}

impl HttpResponse {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    /// The events of a stream: names, where there are any, and data.
    pub(crate) fn events(&self) -> Vec<(Option<String>, Value)> {
        let event = |text: &str| {
            let field =
                |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map(|text| text.trim().to_owned());
            let data = field("data:")?;
            Some((field("event:"), serde_json::from_str(&data).unwrap_or(Value::from(data))))
        };
        self.body.split("\n\n").filter_map(event).collect()
    }

    /// The data of a stream that ends with `[DONE]`, without that.
    pub(crate) fn chunks(&self) -> Vec<Value> {
        let mut all: Vec<Value> = self.events().into_iter().map(|(_, data)| data).collect();
        assert_eq!(all.pop(), Some("[DONE]".into()), "{}", self.body);
        all
    }

    #[track_caller]
    pub(crate) fn error(&self, status: u16) -> Value {
        assert_eq!(self.status, status, "{}", self.body);
        let error = self.json()["error"].clone();
        assert!(error["message"].is_string() && error["type"].is_string(), "{}", self.body);
        error
    }
}

pub(crate) fn start() -> Running {
    start_with(Settings::default(), Some(TEMPLATE))
}

pub(crate) fn start_with(settings: Settings, template: Option<&str>) -> Running {
    start_tokenizing(settings, template, tokenizer())
}

pub(crate) fn start_tokenizing(settings: Settings, template: Option<&str>, tokenizer: Tokenizer) -> Running {
    let engine = Arc::new(TestEngine::default());
    let template = template.map(|source| ChatTemplate::parse(source.into(), Map::new(), Path::new("t.jinja")).unwrap());
    let model = ServedModel {
        engine: engine.clone(),
        name: "test".into(),
        tokenizer,
        template,
        end_tokens: vec![END],
        generation_config: Map::new(),
    };
    let server = Server::bind(model, &Settings { port: 0, ..settings }).expect("a server");
    let address = server.address().expect("an address");
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    let thread = std::thread::spawn(move || server.run(|| stopped.load(Ordering::SeqCst)).expect("served"));
    Running { address, engine, stop, thread: Some(thread) }
}

impl Running {
    /// Asks the server to stop.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
    }

    /// Waits for its end; returns whether all requests were finished.
    pub(crate) fn join(mut self) -> bool {
        self.stop();
        self.thread.take().expect("a thread").join().expect("no panic")
    }

    /// Sends a request, and leaves its answer in the socket.
    pub(crate) fn send(&self, method: &str, path: &str, headers: &str, body: &[u8]) -> TcpStream {
        let mut socket = TcpStream::connect(self.address).expect("a connection");
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-length: {}\r\n{headers}\r\n",
            body.len()
        );
        socket.write_all(head.as_bytes()).expect("sent");
        // The server may have refused the head already.
        let _ = socket.write_all(body);
        socket
    }

    pub(crate) fn request(&self, method: &str, path: &str, headers: &str, body: &[u8]) -> HttpResponse {
        read(self.send(method, path, headers, body))
    }

    pub(crate) fn get(&self, path: &str) -> HttpResponse {
        self.request("GET", path, "", b"")
    }

    pub(crate) fn post(&self, path: &str, body: Value) -> HttpResponse {
        self.request("POST", path, "content-type: application/json\r\n", body.to_string().as_bytes())
    }

    /// Asks for a chat's answer.
    pub(crate) fn chat(&self, text: &str, more: Value) -> HttpResponse {
        let mut body = json!({"model": "test", "messages": [{"role": "user", "content": text}]});
        body.as_object_mut().unwrap().extend(more.as_object().cloned().unwrap_or_default());
        self.post("/v1/chat/completions", body)
    }

    /// Asks for a completion.
    pub(crate) fn complete(&self, prompt: impl Into<Value>, more: Value) -> HttpResponse {
        let mut body = json!({"model": "test", "prompt": prompt.into()});
        body.as_object_mut().unwrap().extend(more.as_object().cloned().unwrap_or_default());
        self.post("/v1/completions", body)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop();
        self.thread.take().map(JoinHandle::join);
    }
}

/// Reads a response to its end.
pub(crate) fn read(mut socket: TcpStream) -> HttpResponse {
    let mut bytes = Vec::new();
    // A server that refuses a body may close the connection while it is being sent.
    let _ = socket.read_to_end(&mut bytes);
    let end = bytes.windows(4).position(|four| four == b"\r\n\r\n").expect("a head") + 4;
    let head = String::from_utf8_lossy(&bytes[..end]).to_lowercase();
    let status = head[9..12].parse().expect("a status");
    let body = match head.contains("transfer-encoding: chunked") {
        true => unchunk(&bytes[end..]),
        false => bytes[end..].to_vec(),
    };
    HttpResponse { status, headers: head, body: String::from_utf8(body).expect("whole characters") }
}

fn unchunk(mut bytes: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    while let Some(line) = bytes.windows(2).position(|two| two == b"\r\n") {
        let size = usize::from_str_radix(std::str::from_utf8(&bytes[..line]).unwrap().trim(), 16).unwrap();
        body.extend_from_slice(&bytes[line + 2..line + 2 + size]);
        bytes = &bytes[line + 4 + size..];
    }
    body
}
