//! Relays and consumers inside the test process, for specs that look into a handler or steer it with barriers.

use std::time::Duration;

use anyhow::{Context, Result};
use consumer::TurnHandler;
use shared::{
    admin::Readiness,
    broker::Broker,
    ids::AgentName,
    pool,
    process::Shutdown,
    settings::{
        ConsumerSettings, DatabaseSettings, EchoSettings, HandlerSettings, NatsSettings, RelaySettings,
        Source,
    },
};
use tokio::task::JoinHandle;

use crate::{World, world::number};

/// A relay or a consumer that runs in this process.
#[derive(Debug)]
pub struct Local {
    name: String,
    shutdown: Shutdown,
    task: JoinHandle<Result<()>>,
}

impl Local {
    /// The name by which lanes and runs know it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Tells it to take no new work; it goes on with what it has.
    pub fn stop_taking(&self) {
        self.shutdown.stop.cancel();
    }

    /// Tells it to give back what it still runs.
    pub fn cut(&self) {
        self.shutdown.stop.cancel();
        self.shutdown.cut.cancel();
    }

    /// Shuts it down and waits for its end.
    pub async fn stop(self) -> Result<()> {
        self.stop_taking();
        self.end().await
    }

    /// Waits for its end.
    pub async fn end(self) -> Result<()> {
        tokio::time::timeout(Duration::from_mins(1), self.task)
            .await
            .with_context(|| format!("{} did not end", self.name))??
    }

    /// Ends it without any goodbye: its tasks are dropped where they stand, its leases are left to expire.
    pub fn kill(self) {
        self.task.abort();
    }
}

impl World {
    /// How its database is reached.
    pub fn database_settings(&self) -> DatabaseSettings {
        DatabaseSettings { url: self.database_url() }
    }

    /// How its NATS is reached.
    pub fn nats_settings(&self) -> NatsSettings {
        NatsSettings {
            urls: vec![self.servers.addresses().nats.clone()],
            creds: None,
            ca: None,
            cert: None,
            key: None,
            stream: self.stream.clone(),
            subject_prefix: self.prefix.clone(),
            replicas: 1,
            max_bytes: Some(1 << 30),
        }
    }

    /// A relay's settings, for [`local_relay_with`](Self::local_relay_with).
    pub fn relay_settings(&self) -> RelaySettings {
        RelaySettings {
            name: format!("relay-{}", number()),
            batch: 100,
            max_in_flight: 1024,
            poll_interval: Duration::from_secs(1),
            drain_timeout: Duration::from_secs(10),
        }
    }

    /// Starts a relay in this process.
    pub async fn local_relay(&self) -> Result<Local> {
        self.local_relay_with(self.relay_settings()).await
    }

    /// Starts a relay with these settings in this process.
    pub async fn local_relay_with(&self, settings: RelaySettings) -> Result<Local> {
        let name = settings.name.clone();
        let pool = pool::connect(&self.database_settings(), &name, 6).await?;
        let broker = Broker::connect(&self.nats_settings(), &name).await?;
        let shutdown = Shutdown::default();
        let readiness = Readiness::new(shutdown.stop.clone());
        let resources = relay::Resources { pool, broker, readiness };
        let running = relay::run(resources, settings, shutdown.clone());
        let task = tokio::spawn(async move { Ok(running.await?) });
        Ok(Local { name, shutdown, task })
    }

    /// A consumer's settings, for [`local_consumer`](Self::local_consumer).
    pub fn consumer_settings(&self, source: Source) -> ConsumerSettings {
        let echo = EchoSettings { delay: Duration::ZERO, failure_rate: 0.0, reply_bytes: None };
        ConsumerSettings {
            name: format!("consumer-{}", number()),
            is_named: true,
            source,
            agent: AgentName::default(),
            concurrency: 64,
            drain_timeout: Duration::from_secs(30),
            history_limit: 200,
            poll_interval: Duration::from_secs(1),
            // Named by the settings, but a local consumer runs the handler that it is given.
            handler: HandlerSettings::Echo(echo),
        }
    }

    /// Starts a consumer with this handler in this process.
    pub async fn local_consumer(
        &self,
        settings: ConsumerSettings,
        handler: impl TurnHandler,
    ) -> Result<Local> {
        let name = settings.name.clone();
        let database = self.database_settings();
        let pool = pool::connect(&database, &name, 6).await?;
        let broker = match settings.source {
            Source::Nats => Some(Broker::connect(&self.nats_settings(), &name).await?),
            Source::Postgres => None,
        };
        let shutdown = Shutdown::default();
        let readiness = Readiness::new(shutdown.stop.clone());
        let resources = consumer::Resources { pool, database, broker, readiness };
        let running = consumer::run(resources, settings, handler, shutdown.clone());
        let task = tokio::spawn(async move { Ok(running.await?) });
        Ok(Local { name, shutdown, task })
    }
}
