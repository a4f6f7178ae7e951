//! `concertina healthcheck`: asks a running server whether it is ready, for container engines that have no other means.

use crate::config::Config;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, ToSocketAddrs};
use std::time::Duration;

/// The longest that connecting, sending and each read may take; a health check of a container should wait longer.
const PATIENCE: Duration = Duration::from_secs(2);

/// The most bytes of an answer that are read.
const MOST_ANSWER: u64 = 64 * 1024;

/// Whether the server of this configuration is ready; the reason if it is not.
pub(super) fn check(config: &Config) -> Result<(), String> {
    if config.tls.is_some() {
        return Err(
            "healthcheck speaks no TLS, and tls.certificate is set: ask GET /v2/health/ready over https instead".into(),
        );
    }
    check_at(&config.address)
}

fn check_at(address: &str) -> Result<(), String> {
    let answer = ask(address).map_err(|error| format!("{address}: {error}"))?;
    let status = answer.split_whitespace().nth(1).unwrap_or_default();
    if status == "200" {
        return Ok(());
    }
    let reason = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    Err(format!("{address}: /v2/health/ready answers {status} {reason}").trim_end().to_owned())
}

fn ask(address: &str) -> io::Result<String> {
    let mut found = address.to_socket_addrs()?;
    let target = found.next().ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "no such address"))?;
    let mut stream = TcpStream::connect_timeout(&reachable(target), PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    // In one piece: a server that answers without reading to the end would break the pipe between two.
    let request = format!("GET /v2/health/ready HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes())?;
    let mut answer = Vec::new();
    stream.take(MOST_ANSWER).read_to_end(&mut answer)?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

/// A server that listens on every address of the machine is asked on the machine's own.
fn reachable(mut address: SocketAddr) -> SocketAddr {
    match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => address.set_ip(Ipv4Addr::LOCALHOST.into()),
        IpAddr::V6(ip) if ip.is_unspecified() => address.set_ip(Ipv6Addr::LOCALHOST.into()),
        _ => {}
    }
    address
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    /// Answers one connection with these bytes; returns the address to ask.
    fn server(answer: &'static str) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = format!("0.0.0.0:{}", listener.local_addr().expect("an address").port());
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a client");
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                stream.read_exact(&mut byte).expect("a whole request");
                head.extend(byte);
            }
            assert!(head.starts_with(b"GET /v2/health/ready HTTP/1.1\r\n"));
            stream.write_all(answer.as_bytes()).expect("a reader");
        });
        address
    }

    #[test]
    fn ready_is_200_and_nothing_else() {
        assert_eq!(check_at(&server("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")), Ok(()));
        let loading = check_at(&server("HTTP/1.1 503 Service Unavailable\r\n\r\n{\"error\":\"loading\"}"));
        assert!(
            loading.as_ref().is_err_and(|reason| reason.contains("answers 503") && reason.contains("loading")),
            "{loading:?}"
        );
        assert!(check_at(&server("")).is_err(), "an empty answer");
    }

    #[test]
    fn nobody_there_is_an_error_that_names_the_address() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address").to_string();
        drop(listener);
        assert!(check_at(&address).is_err_and(|reason| reason.starts_with(&address)));
        assert!(check_at("not an address").is_err());
    }
}
