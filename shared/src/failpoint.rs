//! Failpoints: named places where a test makes this process die, stand still, wait or fail. Compiled in with the feature
//! `failpoints` only; without it every call is empty.
//!
//! `FAILPOINTS="after_claim=kill,before_finish=pause:500*2"`: a list of `name=action`, action `kill` (SIGKILL to self),
//! `stop` (SIGSTOP to self), `pause:MS` or `error`, and with `*N` only the Nth time that the place is reached.

/// A failpoint with the action `error` was reached.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error("failpoint {0}")]
pub struct Hit(pub &'static str);

/// Reaches the failpoint `name`.
#[cfg(not(feature = "failpoints"))]
#[inline]
#[expect(clippy::unused_async, reason = "the same face as with the feature")]
pub async fn reach(_name: &'static str) -> Result<(), Hit> {
    Ok(())
}

#[cfg(feature = "failpoints")]
pub use enabled::reach;

#[cfg(feature = "failpoints")]
mod enabled {
    use std::{
        collections::HashMap,
        sync::{
            LazyLock,
            atomic::{AtomicU64, Ordering},
        },
        time::Duration,
    };

    use super::Hit;

    /// A stop reaches the threads one after the other, so the caller is held until it has; not for ever, since whoever
    /// waited for it may have ended it already.
    const SIGNAL: &str = "kill -s $1 $2; [ $1 = STOP ] || exit; for _ in $(seq 100); do \
                          grep -q '^State:.T' /proc/$2/status && exit; sleep 0.01; done";

    enum Action {
        Signal(&'static str),
        Pause(Duration),
        Error,
    }

    struct Failpoint {
        action: Action,
        only: Option<u64>,
        reached: AtomicU64,
    }

    static FAILPOINTS: LazyLock<HashMap<String, Failpoint>> = LazyLock::new(|| {
        let list = std::env::var("FAILPOINTS").unwrap_or_default();
        list.split(',').filter(|entry| !entry.trim().is_empty()).filter_map(parse).collect()
    });

    fn parse(entry: &str) -> Option<(String, Failpoint)> {
        let (name, action) = entry.trim().split_once('=')?;
        let (action, only) = match action.split_once('*') {
            Some((action, nth)) => (action, Some(nth.parse().ok()?)),
            None => (action, None),
        };
        let action = match action.split_once(':') {
            Some(("pause", millis)) => Action::Pause(Duration::from_millis(millis.parse().ok()?)),
            None if action == "kill" => Action::Signal("KILL"),
            None if action == "stop" => Action::Signal("STOP"),
            None if action == "error" => Action::Error,
            _ => return None,
        };
        Some((name.to_owned(), Failpoint { action, only, reached: AtomicU64::new(0) }))
    }

    /// Reaches the failpoint `name`.
    pub async fn reach(name: &'static str) -> Result<(), Hit> {
        let Some(failpoint) = FAILPOINTS.get(name) else { return Ok(()) };
        let nth = failpoint.reached.fetch_add(1, Ordering::SeqCst) + 1;
        if failpoint.only.is_some_and(|only| only != nth) {
            return Ok(());
        }
        match failpoint.action {
            Action::Signal(signal) => {
                // Blocking on purpose: nothing else of this process may run between the place and its end.
                let me = std::process::id().to_string();
                let _ = std::process::Command::new("sh").args(["-c", SIGNAL, "sh", signal, &me]).status();
                Ok(())
            }
            Action::Pause(pause) => {
                tokio::time::sleep(pause).await;
                Ok(())
            }
            Action::Error => Err(Hit(name)),
        }
    }
}
