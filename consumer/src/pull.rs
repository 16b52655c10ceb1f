//! Our own pull loop on JetStream: a request for as many triggers as there are free slots, one at a time, on an inbox that
//! is given up whenever something is odd. The client's ready-made loops starve a shared durable after a reconnect, and end
//! for good when a consumer is deleted; this one pulls again within a second.

use std::time::Duration;

use async_nats::{Message, StatusCode, Subscriber};
use futures_util::{FutureExt, StreamExt};
use serde_json::json;
use shared::{
    admin::Readiness,
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

/// The name of the readiness check on the broker.
const CHECK: &str = "broker";

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
    /// Messages that were no triggers.
    dropped: u64,
    readiness: Readiness,
    /// The server takes requests, as far as this puller knows.
    healthy: bool,
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
    /// There are no more triggers now; ask again.
    Empty,
    /// The request is over; ask again.
    Over,
    /// The durable or the stream is gone.
    Gone(String),
    /// The server will not take requests now.
    Refused(String),
}

impl Puller {
    /// A puller for one agent's durable.
    pub(crate) fn new(broker: Broker, agent: AgentName, readiness: Readiness) -> Self {
        let link = broker.link();
        let faults = Delays::new(Duration::from_millis(100), Duration::from_secs(2));
        Self { broker, agent, link, request: None, faults, readiness, healthy: false, dropped: 0 }
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
                self.healthy = false;
                self.readiness.set_not_ready(CHECK, &error);
                self.pause().await;
                Err(error)
            }
        }
    }

    async fn wait_for(&mut self, free: usize) -> Result<Vec<Delivery>, BrokerError> {
        let mut deliveries = Vec::new();
        loop {
            self.open_request(free).await?;
            let Some(message) = self.wait().await? else { continue };
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

    /// Until the next try; a new connection is tried at once.
    async fn pause(&mut self) {
        let epoch = self.link.borrow().epoch;
        tokio::select! {
            () = tokio::time::sleep(self.faults.next()) => {}
            Ok(_) = self.link.wait_for(|link| link.connected && link.epoch != epoch) => {}
        }
    }

    fn healthy(&mut self) {
        if !self.healthy {
            self.healthy = true;
            self.readiness.set_ready(CHECK);
        }
    }

    /// Waits for what the server sends. `None`: the request is lost; ask again.
    async fn wait(&mut self) -> Result<Option<Message>, BrokerError> {
        let Self { request: Some(request), link, .. } = self else { return Ok(None) };
        let epoch = request.epoch;
        let message = tokio::select! {
            message = tokio::time::timeout(2 * HEARTBEAT, request.inbox.next()) => message,
            // The first connection may not have been told of yet.
            Ok(link) = link.wait_for(|link| link.epoch != epoch || (epoch > 0 && !link.connected)) => {
                let connected = link.connected;
                drop(link);
                self.request = None;
                return if connected { Ok(None) } else { Err(BrokerError::Disconnected) };
            }
        };
        if let Ok(Some(message)) = message {
            return Ok(Some(message));
        }
        // Silence, or an inbox that ended with the connection.
        self.request = None;
        self.broker.require_connected()?;
        Ok(None)
    }

    async fn take_in(&mut self, message: Message, deliveries: &mut Vec<Delivery>) -> Result<(), BrokerError> {
        match read(message) {
            Sent::Trigger(delivery) => {
                self.healthy();
                self.received();
                deliveries.push(delivery);
            }
            Sent::Foreign(ack, error) => {
                self.received();
                self.dropped += 1;
                tracing::warn!(%error, dropped = self.dropped, "a message that is no trigger was dropped");
                self.send_ack(ack).await?;
            }
            Sent::Alive => self.healthy(),
            Sent::Empty => {
                self.healthy();
                self.close_request();
            }
            Sent::Over => self.close_request(),
            Sent::Gone(reason) => {
                tracing::warn!(reason, agent = %self.agent, "the durable is gone; making it again");
                self.request = None;
                self.healthy = false;
                topology::ensure(&self.broker, std::slice::from_ref(&self.agent)).await?;
                // During an election of leaders it is there and does not answer: not in a hot loop.
                tokio::time::sleep(self.faults.next()).await;
            }
            Sent::Refused(reason) if deliveries.is_empty() => return Err(BrokerError::JetStream(reason)),
            Sent::Refused(_) => self.request = None,
        }
        Ok(())
    }

    fn close_request(&mut self) {
        if let Some(request) = &mut self.request {
            request.open = 0;
        }
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
            // Until it is known that the server takes requests, one that is answered at once.
            let ask = if self.healthy {
                json!({
                    "batch": free,
                    "expires": EXPIRES.as_nanos(),
                    "idle_heartbeat": HEARTBEAT.as_nanos(),
                })
            } else {
                json!({ "batch": free, "no_wait": true })
            };
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

    /// Gives a trigger back that cannot be begun beside others: it comes again at once, to whoever asks.
    pub(crate) async fn give_back(&self, delivery: Delivery) -> Result<(), BrokerError> {
        within(self.broker.client().publish(delivery.ack, "-NAK".into())).await?.map_err(client_error)
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
        StatusCode::NOT_FOUND | StatusCode::TIMEOUT => Sent::Empty,
        StatusCode::NO_RESPONDERS => Sent::Gone("no such stream or durable".into()),
        _ if reason.contains("Consumer Deleted") => Sent::Gone(reason.to_owned()),
        _ if status.as_u16() == 409 && reason.contains("Exceeded") => Sent::Refused(reason.to_owned()),
        _ => Sent::Over,
    }
}

fn client_error(error: impl std::fmt::Display) -> BrokerError {
    BrokerError::JetStream(error.to_string())
}
