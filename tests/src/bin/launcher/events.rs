//! What reaches the main thread, which starts all processes: the kernel ends them with the thread that started them.

use std::{
    io::BufRead,
    sync::mpsc::{self, Receiver, Sender},
    thread,
};

use anyhow::Result;
use tokio::signal::unix::{SignalKind, signal};

/// Something to react to.
pub(crate) enum Event {
    /// A line of standard input.
    Order(String),
    /// Time to end.
    End,
}

/// SIGTERM, SIGINT and SIGHUP, as ends.
pub(crate) fn signals() -> Result<(Sender<Event>, Receiver<Event>)> {
    let (events, queue) = mpsc::channel();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let (mut terminate, mut interrupt, mut hangup) = runtime.block_on(async {
        let [terminate, interrupt, hangup] =
            [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()].map(signal);
        anyhow::Ok((terminate?, interrupt?, hangup?))
    })?;
    let signalled = events.clone();
    thread::spawn(move || {
        runtime.block_on(async {
            tokio::select! { _ = terminate.recv() => (), _ = interrupt.recv() => (), _ = hangup.recv() => () }
        });
        let _main_is_gone = signalled.send(Event::End);
    });
    Ok((events, queue))
}

/// The lines of standard input as orders and its end as an end, along with the signals.
pub(crate) fn orders_and_signals() -> Result<Receiver<Event>> {
    let (events, queue) = signals()?;
    thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            let _main_is_gone = events.send(Event::Order(line));
        }
        let _main_is_gone = events.send(Event::End);
    });
    Ok(queue)
}
