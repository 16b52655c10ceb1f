//! The source without a broker: the consumer claims and begins in one step, and looks after leases itself. Teams start
//! with it; it runs beside relays on the same database, and takes over runs that are queued for a broker nobody reads.

use std::{collections::HashMap, time::Duration};

use shared::{
    backoff::Delays,
    claim::{self, Claim, Claims},
    failpoint,
    ids::{AgentName, ConversationId, RunId, TurnId},
    recovery, sqlstate,
    wake::{Look, Rest, Sleeper},
};
use sqlx::PgPool;
use tokio::sync::OwnedSemaphorePermit;

use crate::{
    begin::{self, Candidate, Leased},
    consumer::Pipeline,
};

/// Turns that one claim takes.
const BATCH: usize = 100;
/// Queued lanes taken over in one pass.
const PAGE: i64 = 64;

/// Claims, starts and recovers until told to stop. A fault of Postgres ends a pass, never the consumer.
pub(crate) async fn serve(pipeline: &Pipeline) {
    tokio::join!(claim_and_start(pipeline), recover(pipeline));
}

/// Looks after leases even while every slot is taken.
async fn recover(pipeline: &Pipeline) {
    let interval = pipeline.settings.poll_interval;
    while pipeline.stop.run_until_cancelled(tokio::time::sleep(interval)).await.is_some() {
        if let Err(error) = recovery::recover_expired(&pipeline.pool).await {
            tracing::warn!(error = sqlstate::safe_text(&error), "leases could not be looked after");
        }
    }
}

async fn claim_and_start(pipeline: &Pipeline) {
    let settings = &pipeline.settings;
    let mut sleeper = Sleeper::new(pipeline.pool.clone(), settings.name.clone(), settings.poll_interval);
    let mut faults = Delays::new(Duration::from_millis(100), Duration::from_secs(5));
    while let Some(mut slots) = pipeline.free_slots(BATCH).await {
        match pass(pipeline, &mut sleeper, &mut slots).await {
            Ok(()) => {
                faults.reset();
                pipeline.readiness.set_ready("postgres");
            }
            Err(error) => {
                drop(slots);
                let (error, pause) = (sqlstate::safe_text(&error), faults.next());
                tracing::warn!(error, pause_ms = pause.as_millis(), "a pass failed");
                pipeline.readiness.set_not_ready("postgres", error);
                pipeline.stop.run_until_cancelled(tokio::time::sleep(pause)).await;
            }
        }
    }
    sleeper.rise().await;
}

async fn pass(
    pipeline: &Pipeline,
    sleeper: &mut Sleeper,
    slots: &mut OwnedSemaphorePermit,
) -> Result<(), sqlx::Error> {
    let taken = take_queued(pipeline, slots).await?;
    // One suspect after the other: a claim could begin a second one.
    let claimed = if taken.suspect { 0 } else { claim(pipeline, slots).await? };
    let found = taken.runs + claimed;
    let look = match found {
        0 => Look::Nothing,
        _ if slots.num_permits() == 0 => Look::Full,
        _ => Look::Some,
    };
    match sleeper.after_pass(look).await {
        Rest::None => {}
        Rest::Blink(nap) => {
            pipeline.stop.run_until_cancelled(tokio::time::sleep(nap)).await;
        }
        Rest::Sleep => {
            sleeper.declare().await?;
            if claim(pipeline, slots).await? == 0 {
                pipeline.stop.run_until_cancelled(sleeper.wait()).await;
            }
        }
    }
    Ok(())
}

/// Claims due lanes straight into `running`. Returns how many were due.
async fn claim(pipeline: &Pipeline, slots: &mut OwnedSemaphorePermit) -> Result<usize, sqlx::Error> {
    let settings = &pipeline.settings;
    let paused = pipeline.policies.borrow().get(&settings.agent).is_none_or(|policy| policy.paused);
    let batch = u32::try_from(slots.num_permits()).unwrap_or(u32::MAX);
    if paused || batch == 0 {
        return Ok(0);
    }
    let term = pipeline.term();
    let request =
        Claim { batch, agents: Some(std::slice::from_ref(&settings.agent)), worker: Some(&settings.name) };
    let Claims { turns, empty, suspects, .. } = claim::claim(&pipeline.pool, request).await?;
    let mut due = turns.len();
    for conversation in &empty {
        due += usize::from(claim::close_empty_lane(&pipeline.pool, conversation).await?);
    }
    if turns.is_empty() {
        return Ok(due);
    }
    let _ = failpoint::reach("after_begin").await;
    let traces: HashMap<_, _> = turns.iter().map(|turn| (turn.run_id, turn.trace_context.clone())).collect();
    let leased = turns.into_iter().map(|turn| Leased {
        conversation_id: turn.conversation_id,
        turn_id: turn.turn_id,
        run_id: turn.run_id,
        attempt: turn.attempt,
        suspect: suspects.contains(&turn.run_id),
    });
    let leased: Vec<Leased> = leased.collect();
    let begun =
        begin::load_claimed(&pipeline.pool, &settings.agent, settings.history_limit, leased, &traces).await?;
    pipeline.start(begun, slots, term);
    Ok(due)
}

/// Begins runs that were queued for a broker and that nobody has begun in time: else migrating back would strand them.
async fn take_queued(pipeline: &Pipeline, slots: &mut OwnedSemaphorePermit) -> Result<Taken, sqlx::Error> {
    let settings = &pipeline.settings;
    let limit = PAGE.min(i64::try_from(slots.num_permits()).unwrap_or(PAGE));
    let late = overdue(&pipeline.pool, &settings.agent, limit).await?;
    if late.is_empty() {
        return Ok(Taken::default());
    }
    let mut candidates: Vec<Candidate> = late
        .into_iter()
        .map(|queued| Candidate {
            conversation_id: queued.conversation_id,
            run_id: queued.run_id,
            turn_id: queued.turn_id,
            attempt: queued.attempt,
            trace_context: queued.trace_context,
        })
        .collect();
    let suspects = begin::suspects(&pipeline.pool, &candidates).await?;
    // Those that run alone come last, one at a time.
    if suspects.len() < candidates.len() {
        candidates.retain(|run| !suspects.contains(&run.run_id));
    } else {
        candidates.truncate(1);
    }
    let term = pipeline.term();
    let begun = begin::begin_queued(
        &pipeline.pool,
        &settings.agent,
        &settings.name,
        settings.history_limit,
        &candidates,
    )
    .await?;
    let taken = Taken { runs: begun.len(), suspect: begun.iter().any(|run| run.suspect) };
    pipeline.start(begun, slots, term);
    Ok(taken)
}

/// Runs that were taken over from a broker.
#[derive(Default)]
struct Taken {
    runs: usize,
    /// One of them has to run alone.
    suspect: bool,
}

struct Overdue {
    conversation_id: ConversationId,
    run_id: RunId,
    turn_id: TurnId,
    attempt: i32,
    trace_context: Option<String>,
}

/// This agent's queued lanes that nobody has begun in time, the longest ago first.
async fn overdue(pool: &PgPool, agent: &AgentName, limit: i64) -> Result<Vec<Overdue>, sqlx::Error> {
    let mut transaction = pool.begin().await?;
    let overdue = sqlx::query_as!(
        Overdue,
        r#"
        select l.conversation_id as "conversation_id: ConversationId", l.run_id as "run_id!: RunId",
               l.turn_id as "turn_id!: TurnId", l.attempt,
               (select o.trace_context from agent_outbox o
                where o.conversation_id = l.conversation_id and o.turn_id = l.turn_id
                  and o.trace_context is not null
                order by o.conversation_id, o.turn_id, o.id limit 1) as trace_context
        from agent_lanes l
        where l.state = 'queued' and l.wake_at <= (select clock_timestamp()) and l.agent = $1
        order by l.wake_at
        limit $2
        "#,
        agent.as_str(),
        limit,
    )
    .fetch_all(&mut *transaction)
    .await?;
    transaction.commit().await?;
    Ok(overdue)
}
