//! Starts servers and ends them: with its standard input for tests, in the foreground for `./dev up`.

mod events;
mod program;
mod up;

use std::{io::Write, path::PathBuf, process::ExitCode};

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use events::Event;
use tests::servers::{Addresses, Host, Order, Spec};

/// Private servers for development and tests
#[derive(Parser)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Start servers, print where they are, obey one order a line, end with standard input
    Servers(Spec),
    /// Start durable servers, a relay and a consumer, and keep them until a signal
    Up {
        /// Where they keep their data and logs
        home: PathBuf,
    },
    /// End what `up` has started there
    Down {
        /// Where they keep their data and logs
        home: PathBuf,
    },
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Servers(spec) => servers(&spec),
        Command::Up { home } => up::up(&home),
        Command::Down { home } => up::down(&home),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Nobody is left to tell when standard error is closed.
            let _told = writeln!(std::io::stderr(), "{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn servers(spec: &Spec) -> Result<()> {
    let events = events::orders_and_signals()?;
    let mut host = Host::start(spec)?;
    answer(&Ok(host.addresses()))?;
    while let Ok(Event::Order(line)) = events.recv() {
        let order: Order = serde_json::from_str(&line).with_context(|| format!("no order: {line}"))?;
        let done = host.obey(order);
        answer(&done.map(|()| host.addresses()).map_err(|error| format!("{error:#}")))?;
    }
    host.stop()
}

fn answer(reply: &Result<Addresses, String>) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", serde_json::to_string(reply)?)?;
    Ok(out.flush()?)
}
