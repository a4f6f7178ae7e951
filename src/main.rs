//! The `concertina` command.
fn main() {}
