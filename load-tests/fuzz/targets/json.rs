#![no_main]

#[path = "../../fuzz_server.rs"]
#[allow(dead_code)]
mod fuzz_server;
mod one;
#[path = "../../../tests/api/support.rs"]
#[allow(dead_code)]
mod support;

libfuzzer_sys::fuzz_target!(|input: &[u8]| one::one(fuzz_server::Target::Json, input));
