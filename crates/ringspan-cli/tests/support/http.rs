//! Requests to a server, over a socket.

use serde_json::Value;
use std::io::{Read, Result, Write};
use std::net::TcpStream;

/// Sends a request to `address`, which is a host and a port; returns the status and the body.
pub fn request(address: &str, method: &str, path: &str, body: &Value) -> Result<(u16, Value)> {
    let body = if body.is_null() { String::new() } else { body.to_string() };
    let (status, body) = send(address, method, path, &body)?;
    Ok((status, serde_json::from_str(&body).unwrap_or_default()))
}

/// Like [`request`], without a body, for an answer that is text.
pub fn request_text(address: &str, method: &str, path: &str) -> Result<(u16, String)> {
    send(address, method, path, "")
}

fn send(address: &str, method: &str, path: &str, body: &str) -> Result<(u16, String)> {
    let mut socket = TcpStream::connect(address)?;
    let length = body.len();
    write!(socket, "{method} {path} HTTP/1.0\r\ncontent-length: {length}\r\n\r\n{body}")?;
    let mut answer = String::new();
    socket.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
    Ok((head[9..12].parse().expect("a status"), body.to_owned()))
}
