//! Publishing: a claimed batch goes out at once, its acknowledgements are awaited together, and what the broker did not
//! take is given back. `Claimed → Published`, or the claim is undone.

use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;
use shared::{
    broker::{Broker, BrokerError},
    claim::Claimed,
    failpoint, release,
    settle::{self, Cause},
    sqlstate,
    trigger::Trigger,
};
use sqlx::PgPool;
use tokio::sync::OwnedSemaphorePermit;

use crate::gate::Gate;

/// Given-back claims are due again after this; by then the relay has noticed that its broker is gone.
const RELEASE_PAUSE: Duration = Duration::from_millis(250);
/// How often a release is tried against a failing Postgres before the look-after is left to find the lanes.
const RELEASE_TRIES: u32 = 3;

/// Hands claimed turns to the broker.
#[derive(Debug, Clone)]
pub(crate) struct Publisher {
    pub(crate) pool: PgPool,
    pub(crate) broker: Broker,
    pub(crate) gate: Arc<Gate>,
}

impl Publisher {
    /// Publishes a batch; holds its share of the in-flight bound until every claim is published or given back.
    pub(crate) async fn publish(self, claims: Vec<Claimed>, _in_flight: OwnedSemaphorePermit) {
        let sent = claims.len();
        let unpublished = self.send_all(claims).await;
        let _ = failpoint::reach("after_publish").await;
        tracing::debug!(published = sent - unpublished.len(), unpublished = unpublished.len(), "published");
        if unpublished.len() < sent {
            self.gate.works();
        }
        if !unpublished.is_empty() {
            self.give_back(&unpublished).await;
        }
    }

    /// Sends triggers again for runs that are queued already.
    pub(crate) async fn publish_again(&self, queued: Vec<Claimed>) {
        let unpublished = self.send_all(queued).await;
        if !unpublished.is_empty() {
            self.give_back(&unpublished).await;
        }
    }

    /// Returns the claims that the broker did not acknowledge.
    async fn send_all(&self, claims: Vec<Claimed>) -> Vec<Claimed> {
        let mut unpublished = Vec::new();
        let mut answers = Vec::with_capacity(claims.len());
        let mut claims = claims.into_iter();
        for claimed in claims.by_ref() {
            match self.send(&claimed).await {
                Ok(answer) => answers.push(async move { (claimed, self.broker.acknowledged(answer).await) }),
                Err(Unsendable::Trigger(rule)) => self.fail(&claimed, rule).await,
                Err(Unsendable::Broker(error)) => {
                    self.gate.close(&error);
                    unpublished.push(claimed);
                    break;
                }
            }
        }
        // After one failure the rest would only wait for their timeouts in turn.
        unpublished.extend(claims);
        for (claimed, answer) in join_all(answers).await {
            if let Err(error) = answer {
                self.gate.close(&error);
                unpublished.push(claimed);
            }
        }
        unpublished
    }

    async fn send(&self, claimed: &Claimed) -> Result<Answer, Unsendable> {
        let trigger =
            Trigger::new(claimed.run_id, claimed.turn_id, claimed.conversation_id.clone(), claimed.attempt);
        let body = trigger.encode().map_err(|error| Unsendable::Trigger(error.to_string()))?;
        let headers =
            trigger.headers(self.broker.stream(), claimed.dispatches, claimed.trace_context.as_deref());
        let subject = self.broker.subjects().of(&claimed.agent, &claimed.conversation_id);
        self.broker.require_connected().map_err(Unsendable::Broker)?;
        self.broker.send(subject, headers, body).await.map_err(Unsendable::Broker)
    }

    /// A fault of one row fails that turn visibly, and no other.
    async fn fail(&self, claimed: &Claimed, rule: String) {
        let cause = Cause::Undeliverable { rule };
        match settle::settle(&self.pool, &claimed.conversation_id, claimed.run_id, &cause).await {
            Ok(settled) => {
                tracing::error!(run_id = %claimed.run_id, outcome = %settled, "a turn cannot be published");
            }
            Err(error) => {
                tracing::warn!(run_id = %claimed.run_id, error = sqlstate::safe_text(&error), "settle failed");
            }
        }
    }

    async fn give_back(&self, claims: &[Claimed]) {
        for _ in 0..RELEASE_TRIES {
            match release::release_unbegun(&self.pool, claims, RELEASE_PAUSE).await {
                Ok(released) => {
                    tracing::info!(
                        unpublished = claims.len(),
                        released = released.len(),
                        "claims given back"
                    );
                    return;
                }
                Err(error) => {
                    tracing::warn!(error = sqlstate::safe_text(&error), "claims could not be given back");
                    tokio::time::sleep(RELEASE_PAUSE).await;
                }
            }
        }
    }
}

type Answer = async_nats::jetstream::context::PublishAckFuture;

enum Unsendable {
    /// This trigger, whatever the broker's state.
    Trigger(String),
    /// The broker, whichever the trigger.
    Broker(BrokerError),
}
