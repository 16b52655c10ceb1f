//! Values that may carry a password: taken from the environment or from a file, and never shown.

use std::{ffi::OsStr, fmt, fs};

use clap::{
    Arg, Command, Error,
    builder::{StringValueParser, TypedValueParser},
    parser::ValueSource,
};

use super::{Checks, given};

/// A URL as it was given, and whether everybody on the machine can read it in the list of processes.
#[derive(Clone)]
pub(super) struct SecretUrl {
    url: String,
    on_command_line: bool,
}

impl fmt::Debug for SecretUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretUrl")
    }
}

impl SecretUrl {
    /// A variable that is set but empty is not given.
    pub(super) fn is_given(&self) -> bool {
        given(Some(&self.url)).is_some()
    }
}

/// Tells clap to keep the source of a [`SecretUrl`].
#[derive(Clone)]
pub(super) struct SecretUrlParser;

impl TypedValueParser for SecretUrlParser {
    type Value = SecretUrl;

    fn parse_ref(&self, command: &Command, arg: Option<&Arg>, value: &OsStr) -> Result<SecretUrl, Error> {
        self.parse_ref_(command, arg, value, ValueSource::CommandLine)
    }

    fn parse_ref_(
        &self,
        command: &Command,
        arg: Option<&Arg>,
        value: &OsStr,
        source: ValueSource,
    ) -> Result<SecretUrl, Error> {
        let url = StringValueParser::new().parse_ref(command, arg, value)?;
        Ok(SecretUrl { url, on_command_line: source == ValueSource::CommandLine })
    }
}

/// The problem has been recorded, so there is no value.
pub(super) struct Refused;

impl Checks {
    /// A URL that must not show its password on the command line.
    pub(super) fn secret_url(
        &mut self,
        setting: &'static str,
        secret: Option<&SecretUrl>,
    ) -> Result<Option<String>, Refused> {
        let Some(secret) = secret else { return Ok(None) };
        let Some(url) = given(Some(&secret.url)) else { return Ok(None) };
        if secret.on_command_line && carries_password(url) {
            return Err(self.refuse(
                setting,
                format!("every user of the machine can read a password on the command line: set the variable {setting}"),
            ));
        }
        Ok(Some(url.to_owned()))
    }

    /// A secret URL, or the content of the file that stands in for it; both together are a problem.
    pub(super) fn secret_url_or_file(
        &mut self,
        (setting, secret): (&'static str, Option<&SecretUrl>),
        (file_setting, file): (&'static str, Option<&String>),
    ) -> Result<Option<String>, Refused> {
        let url = self.secret_url(setting, secret)?;
        let Some(path) = given(file) else { return Ok(url) };
        if url.is_some() {
            return Err(
                self.refuse(setting, format!("is given together with {file_setting}: which one counts?"))
            );
        }
        match fs::read_to_string(path) {
            Ok(content) if content.trim().is_empty() => {
                Err(self.refuse(file_setting, format!("{path:?} is empty")))
            }
            Ok(content) => Ok(Some(content.trim().to_owned())),
            Err(error) => Err(self.refuse(file_setting, format!("cannot read {path:?}: {error}"))),
        }
    }

    fn refuse(&mut self, setting: &'static str, what: String) -> Refused {
        self.problem(setting, what);
        Refused
    }
}

/// Whether a URL names more than a user: `user:password@`, NATS's `token@`, or libpq's `?password=`. In doubt, yes.
fn carries_password(url: &str) -> bool {
    let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
    let user = rest.rsplit_once('@').map(|(user, _)| user);
    let user_alone_is_harmless = scheme.starts_with("postgres");
    rest.contains("password=") || user.is_some_and(|user| !user_alone_is_harmless || user.contains(':'))
}

/// A URL for people: what stands before `@` is left out.
pub(super) fn without_credentials(url: &str) -> String {
    let (scheme, rest) = url.split_once("://").map_or(("", url), |(scheme, rest)| (scheme, rest));
    let host = rest.rsplit_once('@').map_or(rest, |(_, host)| host);
    if scheme.is_empty() { host.to_owned() } else { format!("{scheme}://{host}") }
}

#[cfg(test)]
mod tests {
    use super::carries_password;

    #[test]
    fn a_url_that_could_carry_a_password_is_taken_to_carry_one() {
        for url in [
            "postgres://app:secret@db/app",
            "postgres://app:se/cr@et@db/app",
            "postgresql:///app?password=secret",
            "nats://user:secret@broker:4222",
            "nats://token@broker:4222",
            "user:secret@broker",
            "http://user:secret@agent/",
        ] {
            assert!(carries_password(url), "{url}");
        }
        for url in ["postgres://app@db/app", "postgres:///app?host=/run/postgresql", "nats://broker:4222"] {
            assert!(!carries_password(url), "{url}");
        }
    }
}
