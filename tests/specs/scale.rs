//! Scale: what a turn costs Postgres, who waits behind a crowd, what a relay keeps in memory, and how soon work begins.

mod budget;
mod hot;
mod memory;
mod wakeup;

use std::io::Write;

use anyhow::Result;

/// Shows a measured figure, also of a spec that is kept: figures are worth reading before they break a promise.
fn measured(text: &str) -> Result<()> {
    Ok(writeln!(std::io::stderr(), "measured: {text}")?)
}
