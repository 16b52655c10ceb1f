//! Looking after what is queued: a trigger that the broker lost is sent again. This closes the loop when a broker forgets
//! what it acknowledged.

use futures_util::{StreamExt, stream};
use shared::{broker::BrokerError, claim::Claimed, failpoint};
use tokio_util::sync::CancellationToken;

use crate::{
    publish::Publisher,
    queued::{self, Trigger, Walk},
};

/// Lanes looked at in one pass, so that claiming is never far away.
const PAGE: i64 = 256;
/// Questions to JetStream under way at once.
const QUESTIONS: usize = 64;

/// Asks the broker for every trigger that nobody has begun in time, a page at most. Returns how many were due.
pub(crate) async fn ask_for_overdue(publisher: &Publisher) -> Result<usize, sqlx::Error> {
    let overdue = queued::overdue(&publisher.pool, PAGE).await?;
    let due = overdue.len();
    ask_for(publisher, overdue).await?;
    Ok(due)
}

/// Asks for every trigger that was queued before this relay came, whether it is overdue or not: the broker may have lost
/// them while nobody looked.
pub(crate) async fn ask_for_all(
    publisher: &Publisher,
    stop: &CancellationToken,
) -> Result<usize, sqlx::Error> {
    let Some(mut walk) = Walk::over_queued(&publisher.pool).await? else { return Ok(0) };
    let mut asked = 0;
    while let Some(page) = walk.next(&publisher.pool, PAGE).await? {
        asked += page.len();
        if !ask_for(publisher, page).await? || stop.is_cancelled() {
            break;
        }
    }
    Ok(asked)
}

/// Asks for a page of triggers and moves their lanes on together. Returns false once the broker does not answer: the rest is
/// asked for when it does.
async fn ask_for(publisher: &Publisher, queued: Vec<Claimed>) -> Result<bool, sqlx::Error> {
    let mut answers = stream::iter(queued).map(|run| ask(publisher, run)).buffer_unordered(QUESTIONS);
    let mut asked = Vec::new();
    let mut answering = true;
    while let Some(answer) = answers.next().await {
        match answer {
            Ok(answer) => asked.push(answer),
            Err(error) => {
                publisher.gate.close(&error);
                answering = false;
                break;
            }
        }
    }
    drop(answers);
    if asked.is_empty() || failpoint::reach("mid_reconcile").await.is_err() {
        return Ok(answering);
    }
    let moved = queued::extend(&publisher.pool, asked).await?;
    let lost = moved.into_iter().filter(|(_, trigger)| *trigger == Trigger::Lost).map(|(run, _)| run);
    let lost: Vec<Claimed> = lost.collect();
    for run in &lost {
        tracing::info!(run_id = %run.run_id, dispatches = run.dispatches, "the broker lost a trigger; sending it again");
    }
    publisher.publish_again(lost).await;
    Ok(answering)
}

async fn ask(publisher: &Publisher, run: Claimed) -> Result<(Claimed, Trigger), BrokerError> {
    let subject = publisher.broker.subjects().of(&run.agent, &run.conversation_id);
    let held = publisher.broker.holds(&subject, run.run_id).await?;
    Ok((run, if held { Trigger::Held } else { Trigger::Lost }))
}
