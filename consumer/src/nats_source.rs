//! The source that scales out: triggers that a relay published, over a durable that all consumers of an agent share.

use std::{collections::HashSet, time::Duration};

use shared::{backoff::Delays, broker::Broker, failpoint, policy, sqlstate};
use tokio::sync::OwnedSemaphorePermit;

use crate::{
    begin::{self, Begun, Candidate},
    consumer::Pipeline,
    pull::{Delivery, Evidence, Puller},
};

/// Triggers that one begin takes.
const BATCH: usize = 256;

/// Pulls, begins and starts until told to stop.
pub(crate) async fn serve(pipeline: &Pipeline, broker: Broker) {
    let mut puller = Puller::new(broker, pipeline.settings.agent.clone(), pipeline.readiness.clone());
    while let Some(mut slots) = pipeline.free_slots(BATCH).await {
        let delivered = pipeline.stop.run_until_cancelled(puller.next(slots.num_permits())).await;
        match delivered {
            None => return,
            Some(Ok(deliveries)) => {
                let _ = failpoint::reach("after_receive").await;
                if !begin(pipeline, &puller, deliveries, &mut slots).await {
                    wait_for_postgres(pipeline).await;
                }
            }
            Some(Err(error)) => tracing::warn!(%error, "nothing could be pulled"),
        }
    }
}

/// Begins what was delivered, acknowledges it, and starts the runs. What could not be begun comes again after the
/// durable's `ack_wait`: then this is false.
async fn begin(
    pipeline: &Pipeline,
    puller: &Puller,
    deliveries: Vec<Delivery>,
    slots: &mut OwnedSemaphorePermit,
) -> bool {
    let mut candidates: Vec<Candidate> = deliveries
        .iter()
        .map(|Delivery { trigger, trace_context, .. }| Candidate {
            conversation_id: trigger.conversation_id.clone(),
            run_id: trigger.run_id,
            turn_id: trigger.turn_id,
            attempt: trigger.attempt,
            trace_context: trace_context.clone(),
        })
        .collect();
    let term = pipeline.term();
    let begun = begin_most(pipeline, &mut candidates).await;
    let begun = match begun {
        Ok(begun) => begun,
        Err(error) => {
            let error = sqlstate::safe_text(&error);
            tracing::warn!(error, deliveries = deliveries.len(), "a begin failed");
            pipeline.readiness.set_not_ready("postgres", error);
            return false;
        }
    };
    pipeline.readiness.set_ready("postgres");
    let _ = failpoint::reach("after_begin").await;
    let runs: HashSet<_> = begun.iter().map(|run| run.run_id).collect();
    let asked: HashSet<_> = candidates.iter().map(|candidate| candidate.run_id).collect();
    pipeline.start(begun, slots, term);
    for delivery in deliveries {
        if !asked.contains(&delivery.trigger.run_id) {
            if let Err(error) = puller.give_back(delivery).await {
                tracing::debug!(%error, "a trigger was not given back; it will come again by itself");
            }
            continue;
        }
        let evidence = if runs.contains(&delivery.trigger.run_id) { Evidence::Begun } else { Evidence::Over };
        if evidence == Evidence::Over {
            tracing::info!(run_id = %delivery.trigger.run_id, "a trigger whose run is over was dropped");
        }
        if let Err(error) = puller.ack(delivery, evidence).await {
            tracing::debug!(%error, "an ack was not sent; the trigger will come again and find its run begun");
        }
    }
    true
}

/// Begins the candidates that may run beside each other; what is left of them says which.
async fn begin_most(pipeline: &Pipeline, candidates: &mut Vec<Candidate>) -> Result<Vec<Begun>, sqlx::Error> {
    let settings = &pipeline.settings;
    let suspects = begin::suspects(&pipeline.pool, candidates).await?;
    let mut taken = false;
    candidates.retain(|run| !suspects.contains(&run.run_id) || !std::mem::replace(&mut taken, true));
    begin::begin_queued(&pipeline.pool, &settings.agent, &settings.name, settings.history_limit, candidates)
        .await
}

/// Nothing is pulled that could not be begun: another consumer may be better off.
async fn wait_for_postgres(pipeline: &Pipeline) {
    let mut delays = Delays::new(Duration::from_millis(50), Duration::from_secs(2));
    while pipeline.stop.run_until_cancelled(tokio::time::sleep(delays.next())).await.is_some() {
        match policy::read(&pipeline.pool).await {
            Ok(_) => return pipeline.readiness.set_ready("postgres"),
            Err(error) => pipeline.readiness.set_not_ready("postgres", sqlstate::safe_text(&error)),
        }
    }
}
