//! Where a process is stopped, and how it is brought there: everybody else is at work, the victim reaches the place with the
//! turn of the conversation `target` in its hands.

use anyhow::{Context, Result, ensure};
use tests::{Process, World, world::Launch};

use crate::outside::Outside;

/// A place on the way of a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    BeforeClaim,
    AfterClaim,
    AfterPublish,
    /// Of a queued run whose trigger was lost.
    AmidLookAfter,
    /// Of a running run whose lease was lost.
    AmidRecovery,
    AfterReceive,
    AfterBegin,
    /// No failpoint: the agent holds the call.
    ModelCall,
    BeforeOpStart,
    AfterOpStart,
    AfterTool,
    AfterOpEnd,
    BeforeFinish,
    AmidFinish,
    AfterFinish,
}

/// What happens at the place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Harm {
    /// The process is killed.
    Kill,
    /// The process stands still until its lease is over and others have done its work, then goes on.
    Stop,
    /// The user deletes the conversation.
    Delete,
    /// The user cancels the turn.
    Cancel,
    /// The user submits another message.
    Submit,
}

impl Harm {
    pub(super) const ALL: [Self; 5] = [Self::Kill, Self::Stop, Self::Delete, Self::Cancel, Self::Submit];
}

impl Place {
    fn failpoint(self) -> Option<&'static str> {
        Some(match self {
            Self::BeforeClaim => "before_claim",
            Self::AfterClaim => "after_claim",
            Self::AfterPublish => "after_publish",
            Self::AmidLookAfter | Self::AmidRecovery => "mid_reconcile",
            Self::AfterReceive => "after_receive",
            Self::AfterBegin => "after_begin",
            Self::ModelCall => return None,
            Self::BeforeOpStart => "before_op_start",
            Self::AfterOpStart => "after_op_start",
            Self::AfterTool => "after_tool",
            Self::AfterOpEnd => "after_op_end",
            Self::BeforeFinish => "before_finish",
            Self::AmidFinish => "mid_finish",
            Self::AfterFinish => "after_finish",
        })
    }

    /// A relay is stopped here, else a consumer.
    pub(super) const fn is_of_relay(self) -> bool {
        matches!(
            self,
            Self::BeforeClaim
                | Self::AfterClaim
                | Self::AfterPublish
                | Self::AmidLookAfter
                | Self::AmidRecovery
        )
    }

    /// The turn has a tool call on record, and no outcome yet.
    pub(super) const fn has_operation(self) -> bool {
        matches!(
            self,
            Self::AfterOpStart | Self::AfterTool | Self::AfterOpEnd | Self::BeforeFinish | Self::AmidFinish
        )
    }
}

/// Who is there when the place is reached.
pub(super) struct Stage {
    pub(super) victim: Process,
    /// The relay for a consumer. A relay stands alone: else what it has published is begun before the user acts.
    pub(super) relay: Option<Process>,
}

/// A consumer that asks the agent. One turn at a time: a frozen one has no open pull that swallows other runs' triggers.
pub(super) fn consumer<'a>(world: &'a World, outside: &Outside) -> Launch<'a> {
    outside.asked_by(world.consumer()).env("CONCURRENCY", "1")
}

/// Submits the message, starts everybody, and waits until the victim has been killed or stands still at the place. During
/// the model call it is neither yet.
pub(super) async fn stage(world: &World, outside: &Outside, place: Place, harm: Harm) -> Result<Stage> {
    world.submit("target", "hello").await?;
    match place {
        Place::BeforeClaim if harm == Harm::Cancel => wait_for_a_retry(world, outside).await?,
        Place::AmidLookAfter => lose_a_trigger(world).await?,
        Place::AmidRecovery => lose_a_run(world, outside).await?,
        _ => {}
    }
    let launch = if place.is_of_relay() { world.relay() } else { consumer(world, outside) };
    let action = if harm == Harm::Kill { "kill" } else { "stop" };
    let launch = match place.failpoint() {
        Some(name) => launch.failpoints(&format!("{name}={action}*1")),
        None => launch,
    };
    let victim = launch.start()?;
    let relay = if place.is_of_relay() { None } else { Some(world.relay().start()?) };
    if place == Place::ModelCall {
        let called = async || Ok(!outside.calls("target").is_empty());
        world.eventually("the model is called", called).await?;
    } else if harm == Harm::Kill {
        ended_by_signal(&victim).await?;
    } else {
        victim.frozen().await?;
    }
    Ok(Stage { victim, relay })
}

async fn ended_by_signal(process: &Process) -> Result<()> {
    let status = process.ended().await.context("it does not come to the place")?;
    ensure!(status.code().is_none(), "{} was not killed, but exited: {status}", process.name());
    Ok(())
}

/// The first attempt has failed, and the second is due: only then is there a turn before a claim.
async fn wait_for_a_retry(world: &World, outside: &Outside) -> Result<()> {
    world.policy("retry_backoff = '1 min', retry_backoff_max = '1 min'").await?;
    let former = consumer(world, outside).env("SOURCE", "postgres").start()?;
    let waits = async || {
        let lane = world.lane("target").await?;
        Ok(lane.state == "waiting" && lane.turn_id.is_some())
    };
    world.eventually("it waits for its retry", waits).await?;
    former.kill()?;
    due_now(world).await
}

/// A run is queued, and its trigger was never sent.
async fn lose_a_trigger(world: &World) -> Result<()> {
    let former = world.relay().failpoints("after_claim=kill").start()?;
    ended_by_signal(&former).await?;
    due_now(world).await
}

/// A run is running, and nobody runs it.
async fn lose_a_run(world: &World, outside: &Outside) -> Result<()> {
    let former = consumer(world, outside).env("SOURCE", "postgres").failpoints("after_begin=kill").start()?;
    ended_by_signal(&former).await?;
    due_now(world).await
}

async fn due_now(world: &World) -> Result<()> {
    let due = "update agent_lanes set wake_at = clock_timestamp() where conversation_id = 'target'";
    ensure!(sqlx::query(due).execute(&world.pool).await?.rows_affected() == 1);
    Ok(())
}
