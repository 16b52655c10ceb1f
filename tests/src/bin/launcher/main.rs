//! Starts servers, and ends them with its standard input: the guard of the tests.

use std::{
    io::{BufRead, Write},
    sync::mpsc,
    thread,
};

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use tests::servers::{Host, Order, Spec};
use tokio::signal::unix::{SignalKind, signal};

/// Private servers for development and tests
#[derive(Parser)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Start `PostgreSQL` and NATS, print where they are, obey one order a line, end with standard input
    Servers(Spec),
}

fn main() -> Result<()> {
    match Cli::parse().command {
        Command::Servers(spec) => servers(&spec),
    }
}

/// What reaches the main thread, which starts all processes: the kernel ends them with the thread that started them.
enum Event {
    Order(String),
    End,
}

fn servers(spec: &Spec) -> Result<()> {
    let events = listen()?;
    let mut host = Host::start(spec)?;
    answer(&Ok(host.addresses()))?;
    while let Ok(Event::Order(line)) = events.recv() {
        let order: Order = serde_json::from_str(&line).with_context(|| format!("no order: {line}"))?;
        let done = host.obey(order);
        answer(&done.map(|()| host.addresses()).map_err(|error| format!("{error:#}")))?;
    }
    host.stop()
}

fn answer(reply: &Result<tests::servers::Addresses, String>) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", serde_json::to_string(reply)?)?;
    Ok(out.flush()?)
}

/// Lines of standard input, its end, SIGTERM and SIGINT, in one queue.
fn listen() -> Result<mpsc::Receiver<Event>> {
    let (events, queue) = mpsc::channel();
    let signalled = events.clone();
    thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            let _main_is_gone = events.send(Event::Order(line));
        }
        let _main_is_gone = events.send(Event::End);
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let (mut terminate, mut interrupt) = runtime.block_on(async {
        anyhow::Ok((signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?))
    })?;
    thread::spawn(move || {
        runtime.block_on(async {
            tokio::select! { _ = terminate.recv() => (), _ = interrupt.recv() => () }
        });
        let _main_is_gone = signalled.send(Event::End);
    });
    Ok(queue)
}
