//! Where NATS is, and what the stream of triggers is called and holds.

use std::{fmt, path::PathBuf};

use super::{
    Checks, given, parse,
    secret::{SecretUrl, SecretUrlParser, without_credentials},
};

const GIB: u64 = 1 << 30;

/// Flags and variables of [`NatsSettings`].
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "NATS")]
pub struct NatsArgs {
    /// Servers, separated by commas; with a password or token, by the environment only [default: 127.0.0.1:4222].
    #[arg(id = "nats-url", long, env = "NATS_URL", hide_env_values = true, value_name = "URL,…", value_parser = SecretUrlParser)]
    url: Option<SecretUrl>,
    /// File that holds the servers instead.
    #[arg(id = "nats-url-file", long, env = "NATS_URL_FILE", value_name = "PATH")]
    url_file: Option<String>,
    /// Credentials file with a user's JWT and seed.
    #[arg(id = "nats-creds", long, env = "NATS_CREDS", value_name = "PATH")]
    creds: Option<String>,
    /// Certificates of the authorities to trust, PEM [default: those of the system].
    #[arg(id = "nats-ca", long, env = "NATS_CA", value_name = "PATH")]
    ca: Option<String>,
    /// Certificate to show to the server, PEM; together with its key.
    #[arg(id = "nats-cert", long, env = "NATS_CERT", value_name = "PATH")]
    cert: Option<String>,
    /// Key of that certificate, PEM.
    #[arg(id = "nats-key", long, env = "NATS_KEY", value_name = "PATH")]
    key: Option<String>,
    /// Stream that holds the triggers [default: `AGENT_TURNS`].
    #[arg(long, env = "STREAM", value_name = "NAME")]
    stream: Option<String>,
    /// Start of the triggers' subjects [default: agent.turns].
    #[arg(long, env = "SUBJECT_PREFIX", value_name = "TOKENS")]
    subject_prefix: Option<String>,
    /// Servers that keep a copy of the stream, when it is made, 1 to 5 [default: 1].
    #[arg(long, env = "STREAM_REPLICAS", value_name = "N")]
    stream_replicas: Option<String>,
    /// Size of the stream, when it is made: 1MiB to 1PiB, or 'unlimited' [default: 1GiB].
    #[arg(long, env = "STREAM_MAX_BYTES", value_name = "SIZE")]
    stream_max_bytes: Option<String>,
}

/// Where NATS is, whom to be there, and the stream.
#[derive(Clone, PartialEq, Eq)]
pub struct NatsSettings {
    /// Servers of one cluster, at least one; each may carry credentials, which `Debug` leaves out.
    pub urls: Vec<String>,
    /// A credentials file: a user's JWT and seed.
    pub creds: Option<PathBuf>,
    /// The authorities to trust, in place of the system's.
    pub ca: Option<PathBuf>,
    /// A client's certificate; given exactly when [`key`](Self::key) is.
    pub cert: Option<PathBuf>,
    /// The key of the client's certificate.
    pub key: Option<PathBuf>,
    /// The stream's name, one that the server accepts.
    pub stream: String,
    /// The start of every subject: tokens of `[A-Za-z0-9_-]` joined by dots.
    pub subject_prefix: String,
    /// Copies of the stream, 1 to 5; counts when the stream is made.
    pub replicas: u8,
    /// Bytes that the stream may hold, `None`: as many as the account may; counts when the stream is made.
    pub max_bytes: Option<i64>,
}

impl NatsSettings {
    /// The servers for people: without credentials.
    #[must_use]
    pub fn servers(&self) -> String {
        let servers: Vec<String> = self.urls.iter().map(|url| without_credentials(url)).collect();
        servers.join(", ")
    }
}

impl fmt::Debug for NatsSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hosts: Vec<String> = self.urls.iter().map(|url| without_credentials(url)).collect();
        f.debug_struct("NatsSettings")
            .field("urls", &hosts)
            .field("stream", &self.stream)
            .field("subject_prefix", &self.subject_prefix)
            .field("replicas", &self.replicas)
            .field("max_bytes", &self.max_bytes)
            .finish_non_exhaustive()
    }
}

impl NatsArgs {
    /// Whether a server was named. A command that can do without NATS leaves it alone otherwise.
    #[must_use]
    pub fn name_a_server(&self) -> bool {
        self.url.as_ref().is_some_and(SecretUrl::is_given) || given(self.url_file.as_ref()).is_some()
    }

    /// Takes the servers from their variable or file, and checks the rest.
    pub fn check(&self, checks: &mut Checks) -> NatsSettings {
        let urls = self.servers(checks);
        let cert = checks.optional("NATS_CERT", self.cert.as_ref(), parse::file);
        let key = checks.optional("NATS_KEY", self.key.as_ref(), parse::file);
        match (given(self.cert.as_ref()), given(self.key.as_ref())) {
            (Some(_), None) => checks.problem("NATS_KEY", "is missing: NATS_CERT needs its key"),
            (None, Some(_)) => checks.problem("NATS_CERT", "is missing: NATS_KEY needs its certificate"),
            _ => {}
        }
        let stream = "AGENT_TURNS".to_owned();
        let prefix = "agent.turns".to_owned();
        NatsSettings {
            urls,
            creds: checks.optional("NATS_CREDS", self.creds.as_ref(), parse::file),
            ca: checks.optional("NATS_CA", self.ca.as_ref(), parse::file),
            cert,
            key,
            stream: checks.or("STREAM", self.stream.as_ref(), stream, parse::stream),
            subject_prefix: checks.or(
                "SUBJECT_PREFIX",
                self.subject_prefix.as_ref(),
                prefix,
                parse::subject_prefix,
            ),
            replicas: checks.or("STREAM_REPLICAS", self.stream_replicas.as_ref(), 1, parse::number(1..=5)),
            max_bytes: checks.or(
                "STREAM_MAX_BYTES",
                self.stream_max_bytes.as_ref(),
                i64::try_from(GIB).ok(),
                max_bytes,
            ),
        }
    }

    fn servers(&self, checks: &mut Checks) -> Vec<String> {
        let (url, file) = (self.url.as_ref(), self.url_file.as_ref());
        let given = checks.secret_url_or_file(("NATS_URL", url), ("NATS_URL_FILE", file)).ok().flatten();
        let list = given.as_deref().unwrap_or("nats://127.0.0.1:4222");
        let urls: Vec<String> = list.split(',').map(|url| url.trim().to_owned()).collect();
        if !urls.iter().all(|url| is_server(url)) {
            checks.problem(
                "NATS_URL",
                "must be servers such as nats://host:4222 or tls://host:4222, separated by commas",
            );
        }
        urls
    }
}

fn is_server(url: &str) -> bool {
    let (scheme, rest) = url.split_once("://").unwrap_or(("nats", url));
    matches!(scheme, "nats" | "tls") && !rest.is_empty() && !rest.contains(char::is_whitespace)
}

fn max_bytes(given: &str) -> Result<Option<i64>, String> {
    if given == "unlimited" {
        return Ok(None);
    }
    parse::bytes(1 << 20..=1 << 50)(given).map(|bytes| i64::try_from(bytes).ok())
}
