//! Grouped commits: finishes that arrive while another transaction is under way share the next one. Nothing ever waits
//! for company, so an idle system commits at once, and a busy one commits many turns with one flush.

use std::{sync::Arc, time::Duration};

use shared::{
    backoff::Delays,
    ids::RunId,
    settle::{self, Cause, Settled},
    sqlstate,
};
use sqlx::PgPool;
use tokio::sync::{Mutex, mpsc, oneshot};
use tokio_util::task::TaskTracker;

use crate::finish::{self, Finished, Output};

/// Finishes that one transaction takes: beyond this the gain is small and the locks are held long.
const GROUP: usize = 64;
/// Transactions under way at once.
const COMMITTERS: usize = 2;

struct Request {
    output: Output,
    answer: oneshot::Sender<Finished>,
}

/// Takes finishes in. Cheap to clone; the committers end with the last clone.
#[derive(Debug, Clone)]
pub(crate) struct Finisher {
    requests: mpsc::Sender<Request>,
}

impl Finisher {
    /// Starts the committers. At most `capacity` finishes wait; more wait in their runs.
    pub(crate) fn start(pool: &PgPool, capacity: usize, tasks: &TaskTracker) -> Self {
        let (requests, queue) = mpsc::channel(capacity);
        let queue = Arc::new(Mutex::new(queue));
        for _ in 0..COMMITTERS {
            let committer = Committer { pool: pool.clone(), tasks: tasks.clone() };
            tasks.spawn(committer.commit_groups(queue.clone()));
        }
        Self { requests }
    }

    /// Commits a reply, together with whatever else is ready. Returns when its fate is known; a Postgres that is away is
    /// waited for, since the caller's lease ends the wait where nothing else does.
    pub(crate) async fn finish(&self, output: Output) -> Option<Finished> {
        let (answer, fate) = oneshot::channel();
        self.requests.send(Request { output, answer }).await.ok()?;
        fate.await.ok()
    }
}

struct Committer {
    pool: PgPool,
    tasks: TaskTracker,
}

impl Committer {
    async fn commit_groups(self, queue: Arc<Mutex<mpsc::Receiver<Request>>>) {
        loop {
            let mut group = Vec::new();
            if queue.lock().await.recv_many(&mut group, GROUP).await == 0 {
                return;
            }
            self.commit(group).await;
        }
    }

    /// Commits a group; whoever it fails for, or was busy in it, goes alone.
    async fn commit(&self, group: Vec<Request>) {
        // A run that gave up waiting has lost its lease or is being stopped: its reply is not wanted any more.
        let group: Vec<Request> = group.into_iter().filter(|request| !request.answer.is_closed()).collect();
        if group.is_empty() {
            return;
        }
        // Also one by itself: while it commits, the next group gathers.
        let (alone, ambiguous) = self.commit_together(group).await;
        // Side by side: one that waits for a lock, or for Postgres, holds up no other and no later group.
        for mut request in alone {
            let pool = self.pool.clone();
            self.tasks.spawn(async move {
                tokio::select! {
                    fate = finish_alone(&pool, &request.output, ambiguous) => {
                        let _ = request.answer.send(fate);
                    }
                    () = request.answer.closed() => {}
                }
            });
        }
    }

    /// Returns who must go alone, and whether this commit may have got in all the same.
    async fn commit_together(&self, group: Vec<Request>) -> (Vec<Request>, bool) {
        let outputs: Vec<Output> = group.iter().map(|request| request.output.clone()).collect();
        match finish::finish_group(&self.pool, &outputs).await {
            Ok(fates) => (answer_group(group, fates), false),
            Err(error) => {
                tracing::info!(%error, runs = group.len(), "a grouped commit failed; committing one by one");
                (group, true)
            }
        }
    }
}

fn answer_group(group: Vec<Request>, fates: Vec<Finished>) -> Vec<Request> {
    let mut busy = Vec::new();
    for (request, fate) in group.into_iter().zip(fates) {
        if fate == Finished::Busy {
            busy.push(request);
        } else {
            let _ = request.answer.send(fate);
        }
    }
    busy
}

/// Commits one reply, as often as it takes to know its fate. The fence makes every further try harmless, and the run's
/// record tells whether an earlier one got in: an ambiguous commit never runs the model again.
async fn finish_alone(pool: &PgPool, output: &Output, mut ambiguous: bool) -> Finished {
    let mut delays = Delays::new(Duration::from_millis(50), Duration::from_secs(2));
    loop {
        match finish::finish_one(pool, output).await {
            Ok(Finished::Fenced) if ambiguous => match finish::was_committed(pool, output.run_id).await {
                Ok(committed) => return committed.unwrap_or(Finished::Fenced),
                Err(error) => report(output.run_id, &error),
            },
            Ok(finished) => return finished,
            Err(error) if error.is_rejected_content() => match reject(pool, output, &error.to_string()).await
            {
                Ok(finished) => return finished,
                Err(error) => report(output.run_id, &error),
            },
            Err(error) => {
                ambiguous = true;
                tracing::warn!(run_id = %output.run_id, %error, "a finish failed; trying again");
            }
        }
        tokio::time::sleep(delays.next()).await;
    }
}

/// Postgres refuses the reply: the turn fails visibly, and nobody else's does.
async fn reject(pool: &PgPool, output: &Output, rule: &str) -> Result<Finished, sqlx::Error> {
    let cause = Cause::RejectedContent { rule: rule.to_owned() };
    let settled = settle::settle(pool, &output.conversation_id, output.run_id, &cause).await?;
    tracing::warn!(run_id = %output.run_id, rule, outcome = %settled, "a reply was refused");
    Ok(match settled {
        Settled::Gone => Finished::Gone,
        Settled::Fenced | Settled::Busy => Finished::Fenced,
        _ => Finished::Void,
    })
}

fn report(run: RunId, error: &sqlx::Error) {
    tracing::warn!(run_id = %run, error = sqlstate::safe_text(error), "a finish could not be resolved; trying again");
}
