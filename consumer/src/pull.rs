//! Our own pull loop on JetStream: a request for as many triggers as there are free slots, one at a time, on an inbox that
//! is given up whenever something is odd. The client's ready-made loops starve a shared durable after a reconnect, and end
//! for good when a consumer is deleted; this one pulls again within a second.

use std::time::Duration;

use async_nats::{Message, StatusCode, Subscriber};
use futures_util::{FutureExt, StreamExt};
use serde_json::json;
use shared::{
    backoff::Delays,
    broker::{Broker, BrokerError, Link, within},
    ids::AgentName,
    topology,
    trigger::{NotATrigger, Trigger},
};
use tokio::sync::watch;

/// How long the server keeps a request open.
const EXPIRES: Duration = Duration::from_secs(30);
/// How often the server says that it still has it.
const HEARTBEAT: Duration = Duration::from_secs(5);

/// One trigger as it was delivered. Not acknowledged yet.
#[derive(Debug)]
pub(crate) struct Delivery {
    pub(crate) trigger: Trigger,
    pub(crate) trace_context: Option<String>,
    ack: async_nats::Subject,
}

/// What a delivery turned out to be: the evidence that allows its ack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Evidence {
    /// Its run's begin has committed: from now on the lease owns the run, not the broker.
    Begun,
    /// Its run is over, or never was one of this agent's.
    Over,
}

/// Pulls the triggers of one agent.
#[derive(Debug)]
pub(crate) struct Puller {
    broker: Broker,
    agent: AgentName,
    link: watch::Receiver<Link>,
    request: Option<Request>,
    faults: Delays,
}

/// The open request.
#[derive(Debug)]
struct Request {
    inbox: Subscriber,
    reply: String,
    /// Triggers that the server still owes.
    open: usize,
    /// The connection it was sent over.
    epoch: u64,
}

/// What the server sent on a request's inbox.
enum Sent {
    Trigger(Delivery),
    /// A message that is no trigger: to be acknowledged and dropped.
    Foreign(async_nats::Subject, NotATrigger),
    Alive,
    /// The request is over; ask again.
    Over,
    /// The durable or the stream is gone.
    Gone(String),
    /// The server will not take requests now.
    Refused(String),
}

impl Puller {
    /// A puller for one agent's durable.
    pub(crate) fn new(broker: Broker, agent: AgentName) -> Self {
        let link = broker.link();
        let faults = Delays::new(Duration::from_millis(100), Duration::from_secs(2));
        Self { broker, agent, link, request: None, faults }
    }

    /// Waits for the first trigger, then takes what has come with it: at most `free`. Faults are waited out inside the
    /// caller's patience: an error says why there is nothing now, and the next call tries again.
    pub(crate) async fn next(&mut self, free: usize) -> Result<Vec<Delivery>, BrokerError> {
        match self.wait_for(free).await {
            Ok(deliveries) => {
                self.faults.reset();
                Ok(deliveries)
            }
            Err(error) => {
                self.request = None;
                tokio::time::sleep(self.faults.next()).await;
                Err(error)
            }
        }
    }

    async fn wait_for(&mut self, free: usize) -> Result<Vec<Delivery>, BrokerError> {
        let mut deliveries = Vec::new();
        loop {
            self.open_request(free).await?;
            let Self { request: Some(request), link, .. } = self else { continue };
            let epoch = request.epoch;
            let message = tokio::select! {
                message = tokio::time::timeout(2 * HEARTBEAT, request.inbox.next()) => message,
                _ = link.wait_for(|link| link.connected && link.epoch != epoch) => {
                    self.request = None;
                    continue;
                }
            };
            // Silence: the request is lost. An ended inbox: the connection is closed.
            let Ok(Some(message)) = message else {
                self.request = None;
                self.broker.require_connected()?;
                continue;
            };
            self.take_in(message, &mut deliveries).await?;
            while deliveries.len() < free {
                let Some(request) = &mut self.request else { break };
                let Some(Some(message)) = request.inbox.next().now_or_never() else { break };
                self.take_in(message, &mut deliveries).await?;
            }
            if !deliveries.is_empty() {
                return Ok(deliveries);
            }
        }
    }

    async fn take_in(&mut self, message: Message, deliveries: &mut Vec<Delivery>) -> Result<(), BrokerError> {
        match read(message) {
            Sent::Trigger(delivery) => {
                self.received();
                deliveries.push(delivery);
            }
            Sent::Foreign(ack, error) => {
                self.received();
                tracing::warn!(%error, "a message that is no trigger was dropped");
                self.send_ack(ack).await?;
            }
            Sent::Alive => {}
            Sent::Over => {
                if let Some(request) = &mut self.request {
                    request.open = 0;
                }
            }
            Sent::Gone(reason) => {
                tracing::warn!(reason, agent = %self.agent, "the durable is gone; making it again");
                self.request = None;
                topology::ensure(&self.broker, std::slice::from_ref(&self.agent)).await?;
            }
            Sent::Refused(reason) if deliveries.is_empty() => return Err(BrokerError::JetStream(reason)),
            Sent::Refused(_) => self.request = None,
        }
        Ok(())
    }

    fn received(&mut self) {
        if let Some(request) = &mut self.request {
            request.open = request.open.saturating_sub(1);
        }
    }

    /// Keeps a request open: for `free` triggers, once the server owes nothing any more.
    async fn open_request(&mut self, free: usize) -> Result<(), BrokerError> {
        self.broker.require_connected()?;
        let client = self.broker.client();
        let epoch = self.link.borrow().epoch;
        let mut request = match self.request.take() {
            Some(request) if request.epoch == epoch => request,
            _ => {
                let reply = client.new_inbox();
                let inbox = within(client.subscribe(reply.clone())).await?.map_err(client_error)?;
                Request { inbox, reply, open: 0, epoch }
            }
        };
        if request.open == 0 {
            let subject = format!(
                "$JS.API.CONSUMER.MSG.NEXT.{}.{}",
                self.broker.stream(),
                topology::durable(&self.agent)
            );
            let ask = json!({
                "batch": free,
                "expires": EXPIRES.as_nanos(),
                "idle_heartbeat": HEARTBEAT.as_nanos(),
            });
            let sent = client.publish_with_reply(subject, request.reply.clone(), ask.to_string().into());
            within(sent).await?.map_err(client_error)?;
            request.open = free;
        }
        self.request = Some(request);
        Ok(())
    }

    /// Acknowledges, given what allows it. Without a round trip: a lost ack costs one delivery that finds its run begun.
    pub(crate) async fn ack(&self, delivery: Delivery, _evidence: Evidence) -> Result<(), BrokerError> {
        self.send_ack(delivery.ack).await
    }

    async fn send_ack(&self, ack: async_nats::Subject) -> Result<(), BrokerError> {
        within(self.broker.client().publish(ack, "+ACK".into())).await?.map_err(client_error)
    }
}

fn read(message: Message) -> Sent {
    let Some(status) = message.status else {
        let Some(ack) = message.reply else { return Sent::Alive };
        return match Trigger::decode(&message.payload) {
            Ok(trigger) => {
                let trace_context = message
                    .headers
                    .as_ref()
                    .and_then(|headers| headers.get("traceparent"))
                    .map(|traceparent| traceparent.as_str().to_owned());
                Sent::Trigger(Delivery { trigger, trace_context, ack })
            }
            Err(error) => Sent::Foreign(ack, error),
        };
    };
    let reason = message.description.as_deref().unwrap_or_default();
    match status {
        StatusCode::IDLE_HEARTBEAT => Sent::Alive,
        StatusCode::NO_RESPONDERS => Sent::Gone("no such stream or durable".into()),
        _ if reason.contains("Consumer Deleted") => Sent::Gone(reason.to_owned()),
        _ if status.as_u16() == 409 && reason.contains("Exceeded") => Sent::Refused(reason.to_owned()),
        _ => Sent::Over,
    }
}

fn client_error(error: impl std::fmt::Display) -> BrokerError {
    BrokerError::JetStream(error.to_string())
}
