//! Tasks that stand or fall together, each with a name to be blamed by.

use std::{collections::HashMap, error::Error, time::Duration};

use tokio::{
    task::{AbortHandle, Id, JoinError, JoinSet},
    time,
};
use tokio_util::sync::CancellationToken;

use super::Shutdown;

/// How long tasks get to end by themselves once they are cut short.
const CUT_GRACE: Duration = Duration::from_secs(15);

/// What a supervised task may fail with.
pub type TaskError = Box<dyn Error + Send + Sync>;

/// Why a process went down on its own.
#[derive(Debug, thiserror::Error)]
pub enum TaskFailure {
    /// A task ended although nobody had asked it to.
    #[error("task {name} ended early")]
    EndedEarly {
        /// The task.
        name: &'static str,
    },
    /// A task returned an error.
    #[error("task {name} failed")]
    Failed {
        /// The task.
        name: &'static str,
        /// Its error.
        #[source]
        source: TaskError,
    },
    /// A task panicked; the log has the place.
    #[error("task {name} panicked")]
    Panicked {
        /// The task.
        name: &'static str,
    },
    /// A task went on although it was cut short, and was aborted.
    #[error("task {name} did not stop and was aborted")]
    Stuck {
        /// The task.
        name: &'static str,
    },
}

/// The tasks of a process, supervised together.
///
/// *Workers* go on until `stop` and then finish what they have. *Attendants* serve them and outlive them: they are told
/// to end when the last worker is gone. Dropping `Tasks` aborts them all.
#[derive(Debug)]
pub struct Tasks {
    shutdown: Shutdown,
    workers_gone: CancellationToken,
    set: JoinSet<Result<(), TaskError>>,
    running: HashMap<Id, Task>,
}

#[derive(Debug, Clone, Copy)]
struct Task {
    name: &'static str,
    is_worker: bool,
}

impl Tasks {
    /// No tasks yet; those to come follow `shutdown`.
    #[must_use]
    pub fn new(shutdown: Shutdown) -> Self {
        Self {
            shutdown,
            workers_gone: CancellationToken::new(),
            set: JoinSet::new(),
            running: HashMap::new(),
        }
    }

    /// Starts a worker, which ends only after `stop`.
    pub fn work<E: Into<TaskError>>(
        &mut self,
        name: &'static str,
        task: impl Future<Output = Result<(), E>> + Send + 'static,
    ) {
        let handle = self.set.spawn(async { task.await.map_err(Into::into) });
        self.started(&handle, Task { name, is_worker: true });
    }

    /// Starts an attendant, which ends only after the token that it is given was cancelled.
    pub fn attend<E: Into<TaskError>, F: Future<Output = Result<(), E>> + Send + 'static>(
        &mut self,
        name: &'static str,
        task: impl FnOnce(CancellationToken) -> F,
    ) {
        let task = task(self.workers_gone.clone());
        let handle = self.set.spawn(async { task.await.map_err(Into::into) });
        self.started(&handle, Task { name, is_worker: false });
    }

    /// Waits until every task has ended; the first failure cancels `stop` for all the others.
    ///
    /// What still runs 15 s after `cut` is aborted.
    ///
    /// # Errors
    ///
    /// The first failure. Later ones are logged.
    pub async fn join(mut self) -> Result<(), TaskFailure> {
        let too_late = {
            let cut = self.shutdown.cut.clone();
            async move {
                cut.cancelled().await;
                time::sleep(CUT_GRACE).await;
            }
        };
        tokio::pin!(too_late);
        let mut result = Ok(());
        let mut aborted = false;
        loop {
            if !self.running.values().any(|task| task.is_worker) {
                self.workers_gone.cancel();
            }
            tokio::select! {
                ended = self.set.join_next_with_id() => match ended {
                    None => return result,
                    Some(ended) => {
                        let verdict = self.ended(ended);
                        if verdict.is_err() {
                            self.shutdown.stop.cancel();
                        }
                        result = first_failure(result, verdict);
                    }
                },
                () = &mut too_late, if !aborted => {
                    self.set.abort_all();
                    aborted = true;
                }
            }
        }
    }

    fn started(&mut self, handle: &AbortHandle, task: Task) {
        self.running.insert(handle.id(), task);
    }

    fn ended(&mut self, ended: Result<(Id, Result<(), TaskError>), JoinError>) -> Result<(), TaskFailure> {
        let id = ended.as_ref().map_or_else(JoinError::id, |(id, _)| *id);
        let Some(Task { name, is_worker }) = self.running.remove(&id) else { return Ok(()) };
        let asked_to_end = if is_worker { &self.shutdown.stop } else { &self.workers_gone };
        match ended {
            Ok((_, Ok(()))) if asked_to_end.is_cancelled() => Ok(()),
            Ok((_, Ok(()))) => Err(TaskFailure::EndedEarly { name }),
            Ok((_, Err(source))) => Err(TaskFailure::Failed { name, source }),
            Err(error) if error.is_panic() => Err(TaskFailure::Panicked { name }),
            Err(_) => Err(TaskFailure::Stuck { name }),
        }
    }
}

fn first_failure(first: Result<(), TaskFailure>, next: Result<(), TaskFailure>) -> Result<(), TaskFailure> {
    match (first, next) {
        (Err(first), Err(next)) => {
            tracing::error!(error = &next as &dyn Error, "another task failed");
            Err(first)
        }
        (first, next) => first.and(next),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io,
        sync::{
            Arc,
            atomic::{AtomicBool, Ordering},
        },
    };

    use super::*;

    /// Works until it is told to stop, and then finishes what it has.
    async fn worker(shutdown: Shutdown, finished: Arc<AtomicBool>) -> io::Result<()> {
        shutdown.stop.cancelled().await;
        tokio::task::yield_now().await;
        finished.store(true, Ordering::Relaxed);
        Ok(())
    }

    #[tokio::test]
    async fn a_task_that_ends_early_takes_the_others_down_and_they_finish() {
        let (shutdown, finished) = (Shutdown::default(), Arc::new(AtomicBool::new(false)));
        let mut tasks = Tasks::new(shutdown.clone());
        tasks.work("worker", worker(shutdown.clone(), finished.clone()));
        tasks.work("short", async { io::Result::Ok(()) });
        let failure = tasks.join().await.unwrap_err();
        assert!(matches!(failure, TaskFailure::EndedEarly { name: "short" }), "{failure}");
        assert!(finished.load(Ordering::Relaxed));
        assert!(shutdown.stop.is_cancelled() && !shutdown.cut.is_cancelled());
    }

    #[tokio::test]
    async fn a_panic_and_an_error_are_failures_too() {
        let mut tasks = Tasks::new(Shutdown::default());
        tasks.work("broken", async { panic!("on purpose") as io::Result<()> });
        assert!(matches!(tasks.join().await.unwrap_err(), TaskFailure::Panicked { name: "broken" }));

        let mut tasks = Tasks::new(Shutdown::default());
        tasks.work("refused", async { Err(io::Error::other("no")) });
        assert!(matches!(tasks.join().await.unwrap_err(), TaskFailure::Failed { name: "refused", .. }));
    }

    #[tokio::test]
    async fn attendants_serve_until_the_last_worker_is_gone() {
        let (shutdown, finished) = (Shutdown::default(), Arc::new(AtomicBool::new(false)));
        let mut tasks = Tasks::new(shutdown.clone());
        tasks.work("worker", worker(shutdown.clone(), finished.clone()));
        tasks.attend("attendant", |end| async move {
            end.cancelled().await;
            if finished.load(Ordering::Relaxed) {
                Ok(())
            } else {
                Err(io::Error::other("left a worker alone"))
            }
        });
        shutdown.stop.cancel();
        tasks.join().await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn what_ignores_being_cut_short_is_aborted() {
        let shutdown = Shutdown::default();
        let mut tasks = Tasks::new(shutdown.clone());
        tasks.work("deaf", std::future::pending::<io::Result<()>>());
        shutdown.stop.cancel();
        shutdown.cut.cancel();
        assert!(matches!(tasks.join().await.unwrap_err(), TaskFailure::Stuck { name: "deaf" }));
    }
}
