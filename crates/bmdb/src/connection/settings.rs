//! Connection settings: the address of the database, and what is set on every connection.
//!
//! The server's timeouts bound a statement, a wait for a lock, and a transaction in which nothing is sent. They also
//! end what a dead client left behind. `jit` is off, because compiling costs more than our statements take.

use std::net::IpAddr;
use std::time::Duration;

use sqlx::ConnectOptions;
use sqlx::postgres::{PgConnectOptions, PgSslMode};

use crate::connection::access::{Access, CONNECTION_LIFETIME};
use crate::connection::dialect::Dialect;
use crate::connection::error::BmdbError;
use crate::connection::host_list::split_hosts;
use crate::connection::tls_files::{TlsFile, list_tls_files};
use crate::connection::url_parameters::{AdaptedUrl, adapt_url};

/// Settings of a connection to the BMDB.
#[derive(Clone)]
pub struct ConnectionSettings {
    /// Host, port, user, password and TLS: those of the first host, if the URL has several.
    pub options: PgConnectOptions,
    /// The same of the other hosts, in the order in which they are tried.
    pub other_hosts: Vec<PgConnectOptions>,
    /// Whether each address of a name is tried as a host of its own.
    pub by_address: bool,
    /// Names of the parameters of the URL that are not supported.
    pub ignored_parameters: Vec<String>,
    /// Files of certificates and keys that the URL or the environment names.
    pub tls_files: Vec<TlsFile>,
    /// The dialect of the database.
    pub dialect: Dialect,
    /// Whether the server must take writes.
    pub access: Access,
    /// Most connections of the common pool; one more is used to renew sessions.
    pub max_connections: u32,
    /// How long a connection lives before another one replaces it. The name in the URL is resolved again then.
    pub connection_lifetime: Duration,
    /// Name shown in the server's list of connections.
    pub application: String,
    /// Whether it reads for clients on the network, so that reads hold nothing for long (`read_pool.rs`).
    pub short_reads: bool,
    /// First parts of `search_path`, for tests with a clock of their own.
    pub search_path: Option<String>,
    /// Where the dedicated connections go, around a pooler; `None` if they go where the pool does. Its address and its
    /// login count, and nothing else of it.
    pub direct: Option<Box<ConnectionSettings>>,
}

impl ConnectionSettings {
    /// Settings for a URL of the form `postgres://user@host:5432/database`, with one host or several.
    pub fn from_url(url: &str, application: &str) -> Result<Self, BmdbError> {
        let scheme_is_right = url.starts_with("postgres://") || url.starts_with("postgresql://");
        if !scheme_is_right {
            return Err(BmdbError::InvalidUrl { reason: "it does not begin with postgres://".into() });
        }
        let list = split_hosts(url).map_err(BmdbError::UnusableHosts)?;
        let by_address = list.urls.len() > 1 || list.access.is_some();
        let (mut hosts, mut ignored_parameters) = (Vec::new(), Vec::new());
        for host in &list.urls {
            let AdaptedUrl { url: adapted, ignored } = adapt_url(host);
            let options: PgConnectOptions = adapted.parse().map_err(|error: sqlx::Error| {
                BmdbError::InvalidUrl { reason: redacted_url_error(&error, url) }
            })?;
            hosts.push(options);
            ignored_parameters = ignored;
        }
        Ok(Self {
            // A URL without a list is one, too.
            options: hosts.remove(0),
            other_hosts: hosts,
            by_address,
            ignored_parameters,
            tls_files: list_tls_files(url, |name| std::env::var(name).ok()),
            dialect: Dialect::Postgres,
            access: list.access.unwrap_or_default(),
            max_connections: 16,
            connection_lifetime: CONNECTION_LIFETIME,
            application: application.to_owned(),
            short_reads: false,
            search_path: None,
            direct: None,
        })
    }

    /// Hosts, ports and database for people, without credentials.
    #[must_use]
    pub fn address(&self) -> String {
        let database = self.options.get_database().unwrap_or("(default database)");
        let places: Vec<String> = self.hosts().map(format_place).collect();
        format!("{}/{database}", places.join(","))
    }

    /// Name of the database; without one in the URL, that of the user, as the server takes it.
    #[must_use]
    pub fn database_name(&self) -> &str {
        self.options.get_database().unwrap_or_else(|| self.options.get_username())
    }

    /// All hosts, in the order in which they are tried.
    fn hosts(&self) -> impl Iterator<Item = &PgConnectOptions> {
        std::iter::once(&self.options).chain(&self.other_hosts)
    }

    /// The warning for a database on another host without a verified identity; `None` if it is verified, or if no
    /// network is between.
    #[must_use]
    pub fn tls_warning(&self) -> Option<String> {
        let remote =
            self.hosts().find(|host| host.get_socket().is_none() && !is_this_host(host.get_host()))?;
        let (host, threat) = (remote.get_host(), tls_threat(remote.get_ssl_mode())?);
        Some(format!(
            "{threat} the connection to the BMDB at {host}; add sslmode=verify-full to its URL, and sslrootcert=FILE \
             for a CA of your own"
        ))
    }

    /// The warning for parameters of the URL that are not supported, without their values; `None` without any.
    #[must_use]
    pub fn parameter_warning(&self) -> Option<String> {
        let names = self.ignored_parameters.join(", ");
        (!names.is_empty()).then(|| {
            format!("the URL of the BMDB has parameters that are not supported and are ignored: {names}; remove them")
        })
    }

    /// The settings that correctness depends on, in the form in which PostgreSQL writes them.
    pub(super) fn session_settings(&self) -> Vec<(&'static str, String)> {
        let (silence, statement) = if self.short_reads { ("2500ms", "2500ms") } else { ("5s", "10s") };
        let mut settings = vec![
            ("default_transaction_isolation", self.dialect.isolation().to_owned()),
            ("idle_in_transaction_session_timeout", silence.to_owned()),
            ("statement_timeout", statement.to_owned()),
            ("lock_timeout", "5s".to_owned()),
            ("TimeZone", "UTC".to_owned()),
            ("client_encoding", "UTF8".to_owned()),
            ("standard_conforming_strings", "on".to_owned()),
        ];
        if let Some(search_path) = &self.search_path {
            settings.push(("search_path", search_path.clone()));
        }
        settings
    }

    /// The options of the pool's connections to each host.
    pub(super) fn connect_options(&self) -> Vec<PgConnectOptions> {
        self.hosts().map(|options| self.prepare_options(options)).collect()
    }

    /// The options of direct connections to each host of the direct URL; none without one.
    pub(super) fn direct_options(&self) -> Vec<PgConnectOptions> {
        let hosts = self.direct.iter().flat_map(|direct| direct.hosts());
        hosts.map(|options| self.prepare_options(options)).collect()
    }

    /// Adds to an address and a login what is set on every connection.
    fn prepare_options(&self, options: &PgConnectOptions) -> PgConnectOptions {
        let mut settings = self.session_settings();
        settings.extend([
            ("tcp_keepalives_idle", "10".to_owned()),
            ("tcp_keepalives_interval", "5".to_owned()),
            ("tcp_keepalives_count", "3".to_owned()),
            ("jit", "off".to_owned()),
        ]);
        options
            .clone()
            .application_name(&self.application)
            .options(settings)
            .log_slow_statements(tracing::log::LevelFilter::Debug, Duration::from_secs(1))
            .log_statements(tracing::log::LevelFilter::Trace)
    }
}

/// A server for people: host and port, or the directory of its socket.
pub(super) fn format_place(options: &PgConnectOptions) -> String {
    if let Some(socket) = options.get_socket() {
        return socket.display().to_string();
    }
    let (host, port) = (options.get_host(), options.get_port());
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// Whether a host of a URL is this host, or a directory of sockets.
fn is_this_host(host: &str) -> bool {
    match host.parse::<IpAddr>() {
        Ok(address) => address.to_canonical().is_loopback(),
        Err(_) => host.starts_with('/') || host == "localhost" || host.ends_with(".localhost"),
    }
}

/// Who can interfere with a connection of this mode over a network; `None` if nobody can.
fn tls_threat(mode: PgSslMode) -> Option<&'static str> {
    match mode {
        PgSslMode::Disable | PgSslMode::Allow => Some("everybody on the way can read and change"),
        PgSslMode::Prefer | PgSslMode::Require => Some("anybody who answers on the way can read and change"),
        PgSslMode::VerifyCa => Some("every server with a certificate of the same CA can read and change"),
        PgSslMode::VerifyFull => None,
    }
}

/// A URL parser's message, with the password removed.
fn redacted_url_error(error: &sqlx::Error, url: &str) -> String {
    let text = error.to_string();
    // sqlx begins with the remark that this is about configuration, which the operator who gave a URL knows.
    let text = text.strip_prefix("error with configuration: ").unwrap_or(&text).to_owned();
    let secret = url.split('@').next().and_then(|user| user.rsplit(':').next()).unwrap_or_default();
    if secret.is_empty() { text } else { text.replace(secret, "…") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ipv6_address_is_written_in_brackets_and_used_without() {
        for (url, host, address) in [
            ("postgres://kim@[::1]:6003/bmdb", "::1", "[::1]:6003/bmdb"),
            ("postgres://kim@[2001:db8::1]/bmdb", "2001:db8::1", "[2001:db8::1]:5432/bmdb"),
            ("postgres:///bmdb?host=2001:db8::1&user=kim", "2001:db8::1", "[2001:db8::1]:5432/bmdb"),
            ("postgres:///bmdb?hostaddr=::1&user=kim", "::1", "[::1]:5432/bmdb"),
            ("postgres://kim@127.0.0.1:1/bmdb", "127.0.0.1", "127.0.0.1:1/bmdb"),
            ("postgres://kim@db.example/bmdb", "db.example", "db.example:5432/bmdb"),
            ("postgres://kim@db1,[::1]:6002/bmdb", "db1", "db1:5432,[::1]:6002/bmdb"),
            ("postgres:///bmdb?host=db1,/run/b&user=kim", "db1", "db1:5432,/run/b/bmdb"),
        ] {
            let settings = ConnectionSettings::from_url(url, "test").unwrap();
            assert_eq!(settings.options.get_host(), host, "{url}");
            assert_eq!(settings.address(), address, "{url}");
        }
    }

    #[test]
    fn remote_server_that_is_not_verified_is_a_warning() {
        for (url, part) in [
            (
                "postgres://kim@db.example/bmdb?sslmode=disable",
                Some("everybody on the way can read and change"),
            ),
            ("postgres://kim@db.example/bmdb", Some("anybody who answers on the way can read and change")),
            ("postgres://kim@192.0.2.1/bmdb?sslmode=require", Some("anybody who answers on the way")),
            (
                "postgres://kim@[2001:db8::1]/bmdb?sslmode=verify-ca",
                Some("every server with a certificate of the same"),
            ),
            ("postgres://kim@db.example/bmdb?sslmode=verify-full", None),
            ("postgres://kim@localhost/bmdb", None),
            ("postgres://kim@127.0.0.1:1/bmdb?sslmode=disable", None),
            ("postgres://kim@[::1]/bmdb", None),
            ("postgres:///bmdb?host=/run/postgresql", None),
            (
                "postgres://localhost,db.example/bmdb",
                Some("anybody who answers on the way can read and change"),
            ),
            ("postgres://localhost,db.example/bmdb?sslmode=verify-full", None),
        ] {
            let warning = ConnectionSettings::from_url(url, "test").unwrap().tls_warning();
            assert_eq!(warning.is_some(), part.is_some(), "{url}: {warning:?}");
            assert!(warning.unwrap_or_default().starts_with(part.unwrap_or_default()), "{url}");
        }
    }
}
