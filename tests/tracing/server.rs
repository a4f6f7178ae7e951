//! The built server as a process, and plain HTTP to it.

use std::collections::BTreeMap;
use std::process::Stdio;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::net::TcpStream;
use tokio::process::{Child, ChildStderr, Command};

/// How long anything may take before the test fails.
const PATIENCE: Duration = Duration::from_secs(120);

/// A server that serves the model `slow`; killed if the test fails.
pub(crate) struct Server {
    process: Child,
    log: Lines<BufReader<ChildStderr>>,
    http: String,
    pub(crate) grpc: String,
}

/// What was answered.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    headers: BTreeMap<String, String>,
    pub(crate) body: String,
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }
}

impl Server {
    /// Ready when this returns.
    pub(crate) async fn start(flags: &[&str]) -> Self {
        let root = env!("CARGO_MANIFEST_DIR");
        let mut command = Command::new(env!("CARGO_BIN_EXE_concertina"));
        command.args([
            "serve",
            "--models",
            &format!("{root}/tests/models/slow"),
            "--cache",
            "",
            "--log-format",
            "json",
        ]);
        command.args(["--address", "127.0.0.1:0", "--grpc-address", "127.0.0.1:0", "--drain-announce", "0s"]);
        // What this machine has set for programs of its own is not for this one.
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("OTEL_")) {
            command.env_remove(name);
        }
        if std::env::var_os("CONCERTINA_ONNXRUNTIME").is_none() {
            command.env("CONCERTINA_ONNXRUNTIME", format!("{root}/.setup/onnxruntime/libonnxruntime.so.1.31.1"));
        }
        let mut process = command.args(flags).stderr(Stdio::piped()).kill_on_drop(true).spawn().unwrap();
        let mut log = BufReader::new(process.stderr.take().unwrap()).lines();
        let (mut http, mut grpc) = (String::new(), String::new());
        loop {
            let line = tokio::time::timeout(PATIENCE, log.next_line()).await.unwrap().unwrap().expect("it ended");
            let line: serde_json::Value = serde_json::from_str(&line).unwrap();
            if line["message"] == "listening" {
                http = line["address"].as_str().unwrap().to_owned();
                grpc = line["grpc"].as_str().unwrap().to_owned();
            }
            if line["message"] == "loading is over" {
                return Self { process, log, http, grpc };
            }
        }
    }

    pub(crate) async fn post(&self, path: &str, headers: &str, body: &str) -> Answer {
        let length = body.len();
        self.ask(format!(
            "POST {path} HTTP/1.1\r\n{headers}Content-Length: {length}\r\nHost: x\r\nConnection: close\r\n\r\n{body}"
        ))
        .await
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.ask(format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")).await
    }

    async fn ask(&self, request: String) -> Answer {
        let asked = async {
            let mut stream = TcpStream::connect(&self.http).await.unwrap();
            stream.write_all(request.as_bytes()).await.unwrap();
            let mut text = String::new();
            stream.read_to_string(&mut text).await.unwrap();
            text
        };
        let text = tokio::time::timeout(PATIENCE, asked).await.unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        let (first, headers) = head.split_once("\r\n").unwrap();
        let headers = headers.lines().map(|line| line.split_once(": ").unwrap());
        Answer {
            status: first.split(' ').nth(1).unwrap().parse().unwrap(),
            headers: headers.map(|(name, value)| (name.to_lowercase(), value.to_owned())).collect(),
            body: body.to_owned(),
        }
    }

    /// Drains it; the rest of its log.
    pub(crate) async fn end(mut self) -> Vec<String> {
        let id = self.process.id().unwrap().to_string();
        assert!(Command::new("kill").args(["-TERM", &id]).status().await.unwrap().success());
        let mut lines = Vec::new();
        while let Some(line) = tokio::time::timeout(PATIENCE, self.log.next_line()).await.unwrap().unwrap() {
            lines.push(line);
        }
        let status = tokio::time::timeout(PATIENCE, self.process.wait()).await.unwrap().unwrap();
        assert!(status.success(), "{status}: {lines:?}");
        lines
    }
}
