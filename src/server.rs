//! (being written)

use crate::config::Config;

/// (being written)
///
/// # Errors
/// Always, until it is written.
#[allow(clippy::needless_pass_by_value)]
pub fn run(config: Config) -> anyhow::Result<()> {
    anyhow::bail!("this build cannot serve on {} yet", config.address)
}
