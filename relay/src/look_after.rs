//! Looking after what is queued: a trigger that the broker lost is sent again. This closes the loop when a broker forgets
//! what it acknowledged.

use futures_util::{StreamExt, stream};
use shared::{claim::Claimed, failpoint, sqlstate};
use tokio_util::sync::CancellationToken;

use crate::{
    publish::Publisher,
    queued::{self, Next, Walk},
};

/// Lanes looked at in one pass, so that claiming is never far away.
const PAGE: i64 = 256;
/// Questions to JetStream under way at once.
const QUESTIONS: usize = 64;

/// Asks the broker for every trigger that nobody has begun in time, a page at most. Returns how many were due.
pub(crate) async fn ask_for_overdue(publisher: &Publisher) -> Result<usize, sqlx::Error> {
    let overdue = queued::overdue(&publisher.pool, PAGE).await?;
    let due = overdue.len();
    ask_for(publisher, overdue).await;
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
    loop {
        let page = walk.next(&publisher.pool, PAGE).await?;
        if page.is_empty() {
            return Ok(asked);
        }
        asked += page.len();
        if !ask_for(publisher, page).await || stop.is_cancelled() {
            return Ok(asked);
        }
    }
}

/// Returns false once the broker does not answer: the rest is asked for when it does.
async fn ask_for(publisher: &Publisher, queued: Vec<Claimed>) -> bool {
    stream::iter(queued)
        .map(|lane| ask_for_one(publisher, lane))
        .buffer_unordered(QUESTIONS)
        .all(std::future::ready)
        .await
}

async fn ask_for_one(publisher: &Publisher, lane: Claimed) -> bool {
    let subject = publisher.broker.subjects().of(&lane.agent, &lane.conversation_id);
    let next = match publisher.broker.holds(&subject, lane.run_id).await {
        Ok(true) => Next::Same,
        Ok(false) => Next::Another,
        Err(error) => {
            publisher.gate.close(&error);
            return false;
        }
    };
    if failpoint::reach("mid_reconcile").await.is_err() {
        return true;
    }
    match queued::extend(&publisher.pool, &lane, next).await {
        Ok(Some(dispatches)) if next == Next::Another => {
            tracing::info!(run_id = %lane.run_id, dispatches, "the broker lost a trigger; sending it again");
            publisher.publish_again(Claimed { dispatches, ..lane }).await;
        }
        Ok(_) => {}
        Err(error) => {
            tracing::warn!(run_id = %lane.run_id, error = sqlstate::safe_text(&error), "a queued lane was not moved on");
        }
    }
    true
}
