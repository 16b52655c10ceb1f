//! How a claimer sleeps: until the earliest lane is due, a commit wakes it, or its poll interval ends. Polling is the
//! truth; a notification is only faster.
//!
//! A notification costs every committing producer a lock on the whole cluster, so producers send one only while somebody
//! says in `agent_sleepers` that it sleeps. Who has said so must look once more before it waits: a commit that came before
//! the word was said sent nothing.

use std::time::Duration;

use sqlx::{PgPool, postgres::PgListener};

use crate::{backoff::Delays, sqlstate};

/// The channel of [`wake`](self) notifications.
const CHANNEL: &str = "agent_lanes";
/// How much longer than one sleep the word "I sleep" stands: a crashed sleeper costs producers no longer than that.
const GRACE: Duration = Duration::from_secs(1);

/// Why a sleep ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Woken {
    /// A commit sent a notification.
    Notified,
    /// A lane is due, or the poll interval is over.
    Elapsed,
}

/// A claimer polls for this long after its last work before it says that it sleeps: a burst finds it awake.
const AWAKE: Duration = Duration::from_millis(30);
/// How long it waits between two looks while awake, unless more is due than it could take: so that a busy claimer takes
/// many lanes with one look, and an idle one, which sleeps, still begins at once.
const BLINK: Duration = Duration::from_millis(10);

/// What a claimer's look for work found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Look {
    /// As much as it could take; there may be more.
    Full,
    /// All there was.
    Some,
    /// No work.
    Nothing,
}

/// What a claimer does after a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rest {
    /// There may be more work: look again at once.
    None,
    /// There was work a moment ago: look again after this.
    Blink(Duration),
    /// Say so, look once more, and [`wait`](Sleeper::wait).
    Sleep,
}

/// A claimer's bed.
#[derive(Debug)]
pub struct Sleeper {
    pool: PgPool,
    name: String,
    poll_interval: Duration,
    listener: Option<PgListener>,
    reconnect: Delays,
    retry_at: tokio::time::Instant,
    awake_until: tokio::time::Instant,
    /// When the sleep that was declared ends by itself.
    alarm: tokio::time::Instant,
    declared: bool,
}

impl Sleeper {
    /// A sleeper known as `name` in `agent_sleepers`. Listens on a connection of its own, made when first needed.
    #[must_use]
    pub fn new(pool: PgPool, name: String, poll_interval: Duration) -> Self {
        Self {
            pool,
            name,
            poll_interval,
            listener: None,
            reconnect: Delays::new(Duration::from_millis(250), Duration::from_secs(10)),
            retry_at: tokio::time::Instant::now(),
            awake_until: tokio::time::Instant::now(),
            alarm: tokio::time::Instant::now(),
            declared: false,
        }
    }

    /// How to rest after a pass. Work ends what was declared, so that a busy claimer's producers
    /// do not notify.
    pub async fn after_pass(&mut self, look: Look) -> Rest {
        let now = tokio::time::Instant::now();
        if look != Look::Nothing {
            self.awake_until = now + AWAKE;
            self.rise().await;
        }
        match look {
            Look::Full => Rest::None,
            Look::Some => Rest::Blink(BLINK),
            Look::Nothing if now < self.awake_until => Rest::Blink(BLINK),
            Look::Nothing => Rest::Sleep,
        }
    }

    /// Says that this claimer sleeps. The caller looks for work once more, then calls [`wait`](Self::wait).
    pub async fn declare(&mut self) -> Result<(), sqlx::Error> {
        self.listen().await;
        let mut transaction = self.pool.begin().await?;
        sqlx::query!(
            r#"
            insert into agent_sleepers (name, until)
            values ($1, clock_timestamp() + make_interval(secs => $2))
            on conflict (name) do update set until = excluded.until
            "#,
            self.name,
            (self.poll_interval + GRACE).as_secs_f64(),
        )
        .execute(&mut *transaction)
        .await?;
        transaction.commit().await?;
        self.declared = true;
        // Asked before the caller's last look, not after it: a lane that falls due in between is seen by one of the two.
        let due = next_due(&self.pool).await?.unwrap_or(self.poll_interval);
        self.alarm = tokio::time::Instant::now() + due.min(self.poll_interval);
        Ok(())
    }

    /// Sleeps. Errors of the listening connection end in polling, never in an error.
    pub async fn wait(&mut self) -> Woken {
        let nap = self.alarm.saturating_duration_since(tokio::time::Instant::now());
        let Some(listener) = &mut self.listener else {
            tokio::time::sleep(nap).await;
            return Woken::Elapsed;
        };
        match tokio::time::timeout(nap, listener.try_recv()).await {
            Err(_) => Woken::Elapsed,
            Ok(Ok(Some(_))) => {
                // Everything that was sent until now is answered by one look.
                while listener.next_buffered().is_some() {}
                Woken::Notified
            }
            Ok(lost) => {
                if let Err(error) = lost {
                    tracing::warn!(error = sqlstate::safe_text(&error), "listening was interrupted; polling");
                }
                self.listener = None;
                Woken::Elapsed
            }
        }
    }

    /// Takes the word back, so that producers stop notifying. Best effort: it expires by itself.
    pub async fn rise(&mut self) {
        if self.declared {
            self.declared = false;
            let _ = self.withdraw().await;
        }
    }

    async fn withdraw(&self) -> Result<(), sqlx::Error> {
        let mut transaction = self.pool.begin().await?;
        sqlx::query!("delete from agent_sleepers where name = $1", self.name)
            .execute(&mut *transaction)
            .await?;
        transaction.commit().await
    }

    async fn listen(&mut self) {
        if self.listener.is_some() || tokio::time::Instant::now() < self.retry_at {
            return;
        }
        match connect(&self.pool).await {
            Ok(listener) => {
                self.reconnect.reset();
                self.listener = Some(listener);
            }
            Err(error) => {
                self.retry_at = tokio::time::Instant::now() + self.reconnect.next();
                tracing::warn!(error = sqlstate::safe_text(&error), "cannot listen; polling");
            }
        }
    }
}

async fn connect(pool: &PgPool) -> Result<PgListener, sqlx::Error> {
    let mut listener = PgListener::connect_with(pool).await?;
    listener.eager_reconnect(false);
    listener.listen(CHANNEL).await?;
    Ok(listener)
}

/// How long until the earliest lane that is not due yet is due; `None`: there is none. What is due already and was not
/// taken is held by somebody else, or waits for the broker: it is looked at with the next poll.
async fn next_due(pool: &PgPool) -> Result<Option<Duration>, sqlx::Error> {
    let mut transaction = pool.begin().await?;
    let seconds = sqlx::query_scalar!(
        r#"
        select extract(epoch from least(
            (select wake_at from agent_lanes
             where state = 'waiting' and wake_at > (select clock_timestamp()) order by wake_at limit 1),
            (select wake_at from agent_lanes
             where state = 'queued' and wake_at > (select clock_timestamp()) order by wake_at limit 1),
            (select wake_at from agent_lanes
             where state = 'running' and wake_at > (select clock_timestamp()) order by wake_at limit 1)
        ) - clock_timestamp())::float8 as seconds
        "#,
    )
    .fetch_one(&mut *transaction)
    .await?;
    transaction.commit().await?;
    Ok(seconds.map(|seconds| Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or_default()))
}

/// Wakes the sleepers, after a commit that left a lane waiting. Not within its transaction: who says that he sleeps between
/// the question and the commit would hear nothing and see nothing. Best effort, as polling is the truth.
pub async fn notify(pool: &PgPool) {
    if let Err(error) = try_notify(pool).await {
        tracing::debug!(error = sqlstate::safe_text(&error), "nobody was woken; they poll");
    }
}

async fn try_notify(pool: &PgPool) -> Result<(), sqlx::Error> {
    let mut transaction = pool.begin().await?;
    sqlx::query!("select agent_lanes_notify() as notified").fetch_one(&mut *transaction).await?;
    transaction.commit().await
}
