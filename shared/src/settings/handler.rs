//! Who answers a consumer's turns: the built-in echo, or an agent behind HTTP.

use std::{fmt, time::Duration};

use super::{
    Checks, given, parse,
    secret::{SecretUrl, SecretUrlParser, without_credentials},
};

/// Flags and variables of [`HandlerSettings`].
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Handler")]
pub struct HandlerArgs {
    /// Who answers: an agent behind HTTP, or an echo for trials and load tests.
    #[arg(long, env = "HANDLER", value_name = "echo|http")]
    handler: Option<String>,
    /// http: address that each turn is posted to; with a password, by the environment only.
    #[arg(long, env = "HANDLER_URL", hide_env_values = true, value_name = "URL", value_parser = SecretUrlParser)]
    handler_url: Option<SecretUrl>,
    /// http: time to reach the agent, 10ms to 5m; the turn has its own limit [default: 5s].
    #[arg(long, env = "HANDLER_CONNECT_TIMEOUT", value_name = "DURATION")]
    handler_connect_timeout: Option<String>,
    /// http: address at which the agent reaches this consumer's operations [default: the admin address].
    #[arg(long, env = "OPERATIONS_URL", value_name = "URL")]
    operations_url: Option<String>,
    /// echo: how long it thinks, 0s to 1day [default: 0s].
    #[arg(long, env = "ECHO_DELAY", value_name = "DURATION")]
    echo_delay: Option<String>,
    /// echo: share of attempts that fail, 0 to 1 [default: 0].
    #[arg(long, env = "ECHO_FAILURE_RATE", value_name = "SHARE")]
    echo_failure_rate: Option<String>,
    /// echo: size of every reply, 0B to 16MiB [default: that of the echo].
    #[arg(long, env = "ECHO_REPLY_BYTES", value_name = "SIZE")]
    echo_reply_bytes: Option<String>,
}

/// Who answers.
#[derive(Debug, Clone, PartialEq)]
pub enum HandlerSettings {
    /// The messages of the turn come back as they are.
    Echo(EchoSettings),
    /// An agent of its own, asked over HTTP.
    Http(HttpSettings),
}

/// How the echo behaves.
#[derive(Debug, Clone, PartialEq)]
pub struct EchoSettings {
    /// Time between the turn and its reply, up to a day.
    pub delay: Duration,
    /// Share of attempts that fail, 0 to 1.
    pub failure_rate: f64,
    /// Bytes of every reply, up to 16 MiB; `None`: as many as the echo has.
    pub reply_bytes: Option<usize>,
}

/// How the agent behind HTTP is reached, and how it reaches us.
#[derive(Clone, PartialEq, Eq)]
pub struct HttpSettings {
    /// Where turns are posted: absolute, `http` or `https`; may carry credentials, which `Debug` leaves out.
    pub url: String,
    /// Where the agent reaches the consumer's operations; `None`: at the admin server's address.
    pub operations_url: Option<String>,
    /// Time to connect, 10 ms to 5 min.
    pub connect_timeout: Duration,
}

impl fmt::Debug for HttpSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpSettings")
            .field("url", &without_credentials(&self.url))
            .field("operations_url", &self.operations_url)
            .field("connect_timeout", &self.connect_timeout)
            .finish()
    }
}

impl HandlerArgs {
    /// Checks the settings of the chosen handler. Those of the other one are problems, since they would do nothing.
    pub(super) fn check(&self, checks: &mut Checks) -> HandlerSettings {
        let names = [("echo", "echo"), ("http", "http")];
        let chosen = checks.optional("HANDLER", self.handler.as_ref(), parse::choice(&names));
        if given(self.handler.as_ref()).is_none() {
            checks.problem("HANDLER", "is missing: http, or echo for a trial");
        }
        if let Some(chosen) = chosen {
            self.refuse_settings_of_other_than(chosen, checks);
        }
        let (echo, http) = (self.echo(checks), self.http(checks));
        if chosen == Some("http") && !self.handler_url.as_ref().is_some_and(SecretUrl::is_given) {
            checks.problem("HANDLER_URL", "is missing: HANDLER=http needs the agent's address");
        }
        if chosen == Some("http") { HandlerSettings::Http(http) } else { HandlerSettings::Echo(echo) }
    }

    fn echo(&self, checks: &mut Checks) -> EchoSettings {
        let day = Duration::from_hours(24);
        EchoSettings {
            delay: checks.or(
                "ECHO_DELAY",
                self.echo_delay.as_ref(),
                Duration::ZERO,
                parse::duration(Duration::ZERO..=day),
            ),
            failure_rate: checks.or(
                "ECHO_FAILURE_RATE",
                self.echo_failure_rate.as_ref(),
                0.0,
                parse::number(0.0..=1.0),
            ),
            reply_bytes: checks
                .optional("ECHO_REPLY_BYTES", self.echo_reply_bytes.as_ref(), parse::bytes(0..=16 << 20))
                .and_then(|bytes| usize::try_from(bytes).ok()),
        }
    }

    fn http(&self, checks: &mut Checks) -> HttpSettings {
        let url = checks.secret_url("HANDLER_URL", self.handler_url.as_ref()).ok().flatten();
        let connect = Duration::from_millis(10)..=Duration::from_mins(5);
        HttpSettings {
            url: checks.or("HANDLER_URL", url.as_ref(), String::new(), parse::http_url),
            operations_url: checks.optional("OPERATIONS_URL", self.operations_url.as_ref(), parse::http_url),
            connect_timeout: checks.or(
                "HANDLER_CONNECT_TIMEOUT",
                self.handler_connect_timeout.as_ref(),
                Duration::from_secs(5),
                parse::duration(connect),
            ),
        }
    }

    fn refuse_settings_of_other_than(&self, chosen: &str, checks: &mut Checks) {
        let is_given = |raw: &Option<String>| given(raw.as_ref()).is_some();
        let all = [
            ("http", "HANDLER_URL", self.handler_url.as_ref().is_some_and(SecretUrl::is_given)),
            ("http", "HANDLER_CONNECT_TIMEOUT", is_given(&self.handler_connect_timeout)),
            ("http", "OPERATIONS_URL", is_given(&self.operations_url)),
            ("echo", "ECHO_DELAY", is_given(&self.echo_delay)),
            ("echo", "ECHO_FAILURE_RATE", is_given(&self.echo_failure_rate)),
            ("echo", "ECHO_REPLY_BYTES", is_given(&self.echo_reply_bytes)),
        ];
        for (handler, setting, _) in all.iter().filter(|(handler, _, given)| *given && *handler != chosen) {
            checks.problem(setting, format!("is for HANDLER={handler}, and HANDLER is {chosen}"));
        }
    }
}
