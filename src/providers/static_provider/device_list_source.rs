//! Source of a static device list: file or URL, reloaded on change.
//!
//! Every call checks whether the list has changed (a file by inode, length and times, a server by `ETag` or
//! `Last-Modified`) and reads it again if so. The last good list is only returned if the source itself reports that it
//! is unchanged. If the new list cannot be read, the call fails: continuing with the old list would hide a broken edit
//! until the next restart, and would then surprise at the worst time.
//!
//! Commands and host keys of a list are trusted only if nobody but the operator can have written them: the list is a
//! file that no other user can change, or its SHA-256 is configured. `https` or a password in a URL is not enough, because the
//! operator of a web server is not the operator of this host. With a configured SHA-256, a list of another is rejected,
//! with or without commands.
//!
//! Callers that arrive while the list is being read share the next read. If they read one after the other, each worker
//! of a shepherd would wait for the time limit of a server that hangs, and the last of ten for five minutes.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use reqwest::header::{ETAG, HeaderMap, HeaderValue, IF_MODIFIED_SINCE, IF_NONE_MATCH, LAST_MODIFIED};
use reqwest::{StatusCode, Url};
use rustix::fs::OFlags;
use tokio::fs::OpenOptions;
use tokio::io::AsyncReadExt;
use tokio::sync::Mutex;

use trusted_file::unchangeable_path::{FileUse, check_unchangeable};

use crate::model::excerpt::with_excerpt;
use crate::model::text_file::decode_text;
use crate::providers::http;
use crate::providers::provider::{ErrorClass, ProviderError};
use crate::providers::static_provider::device_list::{self, Device, ListTrust};

/// Coarser than any file system's times.
const TIMESTAMP_GRANULARITY_SECONDS: i64 = 2;

/// One device list, which is reloaded when it changes.
pub struct DeviceListSource {
    location: ListLocation,
    /// The only list that is accepted, by its SHA-256 in lower-case hexadecimal.
    sha256: Option<String>,
    state: Mutex<SourceState>,
}

#[derive(Default)]
struct SourceState {
    /// The last good list.
    cached: Option<CachedList>,
    /// The last completed read, shared by callers that arrived before it started.
    last_read: Option<CompletedRead>,
}

/// The result of one read.
struct CompletedRead {
    started_at: Instant,
    outcome: Result<Arc<Vec<Device>>, ProviderError>,
}

enum ListLocation {
    File(PathBuf),
    Http { url: Url, client: reqwest::Client },
}

struct CachedList {
    version: ListVersion,
    devices: Arc<Vec<Device>>,
}

/// Identifies one version of a list.
#[derive(PartialEq, Eq)]
enum ListVersion {
    File {
        device: u64,
        inode: u64,
        length: u64,
        modified: (i64, i64),
        changed: (i64, i64),
    },
    /// A file that was changed a moment before it was read: a second change could have the same times.
    JustModified,
    Http {
        etag: Option<HeaderValue>,
        modified: Option<HeaderValue>,
    },
}

impl DeviceListSource {
    /// Checks a list's URL and the SHA-256 that it must have; reads nothing yet.
    pub fn new(url: &str, sha256: Option<&str>) -> Result<Self, ProviderError> {
        let wrong = |problem: &str| {
            // The text is not shown: a text that is no URL may still hold a password.
            ProviderError::new(
                ErrorClass::Configuration,
                "device list",
                format!("the device list's URL {problem}; give file:///path or http(s)://host/path"),
            )
        };
        let url = Url::parse(url).map_err(|error| wrong(&format!("is none ({error})")))?;
        let place = match url.scheme() {
            "file" => {
                ListLocation::File(url.to_file_path().map_err(|()| wrong("names no file of this host"))?)
            }
            "http" | "https" => ListLocation::Http { client: http::build_client(&url)?, url },
            scheme => return Err(wrong(&format!("begins with {scheme}:"))),
        };
        let source = Self { location: place, sha256: sha256.map(str::to_lowercase), state: Mutex::default() };
        let is_digest = |text: &String| text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        if !source.sha256.as_ref().is_none_or(is_digest) {
            return Err(source.list_error(
                ErrorClass::Configuration,
                "its configured SHA-256 is none; give the 64 hexadecimal digits that sha256sum prints",
            ));
        }
        Ok(source)
    }

    /// The endpoint that errors name.
    #[must_use]
    pub fn endpoint(&self) -> String {
        match &self.location {
            ListLocation::File(path) => format!("file://{}", path.display()),
            ListLocation::Http { url, .. } => http::endpoint(url),
        }
    }

    /// Loads the present list.
    pub async fn load_devices(&self) -> Result<Arc<Vec<Device>>, ProviderError> {
        let requested_at = Instant::now();
        let mut state = self.state.lock().await;
        // A read that started after this call shows the list as it is for this caller.
        if let Some(reading) = state.last_read.as_ref().filter(|reading| reading.started_at > requested_at) {
            return reading.outcome.clone();
        }
        let began = Instant::now();
        let outcome = self.reload(&mut state.cached).await;
        state.last_read = Some(CompletedRead { started_at: began, outcome: outcome.clone() });
        outcome
    }

    async fn reload(&self, last: &mut Option<CachedList>) -> Result<Arc<Vec<Device>>, ProviderError> {
        let read = match &self.location {
            ListLocation::File(path) => self.read_file(path, last.as_ref()).await?,
            ListLocation::Http { url, client } => self.read_http(url, client, last.as_ref()).await?,
        };
        match (read, &*last) {
            (None, Some(last)) => Ok(Arc::clone(&last.devices)),
            (None, None) => {
                Err(self
                    .list_error(ErrorClass::Unreadable, "the server says that it has not changed, unasked"))
            }
            (Some((version, text)), _) => {
                // Dropped first: if the new list is broken, "unchanged" must not bring the old one back.
                *last = None;
                let trust = self.list_trust(&text).await?;
                let text = decode_text(&text)
                    .map_err(|error| self.list_error(ErrorClass::Unreadable, &error.to_string()))?;
                let devices = device_list::parse_device_list(text, &trust)
                    .map_err(|error| self.list_error(ErrorClass::Unreadable, &error.to_string()))?;
                let devices = Arc::new(devices);
                *last = Some(CachedList { version, devices: Arc::clone(&devices) });
                Ok(devices)
            }
        }
    }

    /// Whether the commands and host keys of a list with this content are believed. A list of another SHA-256 is an
    /// error.
    async fn list_trust(&self, content: &[u8]) -> Result<ListTrust, ProviderError> {
        if let Some(expected) = &self.sha256 {
            let found = hex::encode(ring::digest::digest(&ring::digest::SHA256, content));
            if found == *expected {
                return Ok(ListTrust::Trusted);
            }
            return Err(self.list_error(
                ErrorClass::Unreadable,
                &format!(
                    "its SHA-256 is {found}, and {expected} is configured; check who changed it, then configure \
                     the new one"
                ),
            ));
        }
        Ok(match &self.location {
            ListLocation::File(path) => match check_path(path.clone()).await {
                Ok(()) => ListTrust::Trusted,
                Err(error) => ListTrust::Untrusted {
                    reason: format!(
                        "commands and host keys are accepted only from a file that nobody else can change, and {error}"
                    ),
                },
            },
            ListLocation::Http { .. } => ListTrust::Untrusted {
                reason: "commands and host keys from a server are accepted only in a list with a configured SHA-256; \
                         give --static_device_list_sha256, or device_list_sha256 in its [[provider]] table, or \
                         use a local file"
                    .to_owned(),
            },
        })
    }

    async fn read_file(
        &self,
        path: &Path,
        last: Option<&CachedList>,
    ) -> Result<Option<(ListVersion, Vec<u8>)>, ProviderError> {
        let failed = |error: std::io::Error| {
            use std::io::ErrorKind::{IsADirectory, NotFound, PermissionDenied};
            let class = match error.kind() {
                NotFound | PermissionDenied | IsADirectory => ErrorClass::Configuration,
                _ => ErrorClass::Transient,
            };
            self.list_error(class, &format!("it cannot be read: {error}"))
        };
        // Without `NONBLOCK` opening a named pipe would wait for its writer, and occupy a thread until then.
        let flags = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or(0);
        let file = OpenOptions::new().read(true).custom_flags(flags).open(path).await.map_err(failed)?;
        let found = file.metadata().await.map_err(failed)?;
        if !found.is_file() {
            return Err(self.list_error(ErrorClass::Configuration, "it is not a file"));
        }
        let mut version = ListVersion::File {
            device: found.dev(),
            inode: found.ino(),
            length: found.len(),
            modified: (found.mtime(), found.mtime_nsec()),
            changed: (found.ctime(), found.ctime_nsec()),
        };
        if last.is_some_and(|last| last.version == version) {
            return Ok(None);
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
        if i64::try_from(now).is_ok_and(|now| now - found.ctime() <= TIMESTAMP_GRANULARITY_SECONDS) {
            version = ListVersion::JustModified;
        }
        let mut text = Vec::new();
        let limit = http::MAX_RESPONSE_BYTES as u64;
        file.take(limit + 1).read_to_end(&mut text).await.map_err(failed)?;
        if text.len() as u64 > limit {
            return Err(self.list_error(ErrorClass::Unreadable, &format!("it is larger than {limit} bytes")));
        }
        Ok(Some((version, text)))
    }

    async fn read_http(
        &self,
        url: &Url,
        client: &reqwest::Client,
        last: Option<&CachedList>,
    ) -> Result<Option<(ListVersion, Vec<u8>)>, ProviderError> {
        let mut request = client.get(url.clone());
        if let Some(CachedList { version: ListVersion::Http { etag, modified }, .. }) = last {
            if let Some(etag) = etag {
                request = request.header(IF_NONE_MATCH, etag);
            } else if let Some(modified) = modified {
                request = request.header(IF_MODIFIED_SINCE, modified);
            }
        }
        let response = request.send().await.map_err(|error| http::request_error(url, &error))?;
        let status = response.status();
        if status == StatusCode::NOT_MODIFIED {
            return Ok(None);
        }
        if !status.is_success() {
            let class = if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS {
                ErrorClass::Transient
            } else {
                ErrorClass::Configuration
            };
            let words = http::read_excerpt(response, url).await;
            let problem = with_excerpt(format_args!("the server answered {status}"), words.as_ref());
            return Err(self.list_error(class, &problem));
        }
        let header = |headers: &HeaderMap, name| headers.get(name).cloned();
        let version = ListVersion::Http {
            etag: header(response.headers(), ETAG),
            modified: header(response.headers(), LAST_MODIFIED),
        };
        Ok(Some((version, http::read_body(response, url).await?)))
    }

    fn list_error(&self, class: ErrorClass, problem: &str) -> ProviderError {
        let shown = match &self.location {
            ListLocation::File(path) => path.display().to_string(),
            ListLocation::Http { url, .. } => http::redact_url(url),
        };
        ProviderError::new(class, self.endpoint(), format!("the device list {shown}: {problem}"))
    }
}

/// Checks that nobody else can change a file; the error is a sentence. The file system may be one of the network that does
/// not answer.
async fn check_path(path: PathBuf) -> Result<(), String> {
    let check =
        move || check_unchangeable(&path, FileUse::Commands).map(drop).map_err(|error| error.to_string());
    let checked = tokio::task::spawn_blocking(check).await;
    checked.unwrap_or_else(|error| Err(format!("the check of its path failed: {error}")))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::time::Duration;

    use super::*;

    #[test]
    fn unsupported_url_is_rejected() {
        for (url, part) in [
            ("/etc/devices.json", "is none"),
            ("ftp://h/devices.json", "begins with ftp:"),
            ("file://elsewhere/devices.json", "names no file of this host"),
        ] {
            let error = DeviceListSource::new(url, None).err().unwrap();
            assert_eq!(error.class, ErrorClass::Configuration);
            assert!(error.message.contains(part), "{}", error.message);
        }
    }

    fn file_source(path: &Path, sha256: Option<&str>) -> Result<DeviceListSource, ProviderError> {
        DeviceListSource::new(&format!("file://{}", path.display()), sha256)
    }

    const WITH_COMMAND: &str = r#"[{"ID":"a","Addr":"h","PowerCommand":["/bin/pdu"]}]"#;

    fn set_mode(path: &Path, mode: u32) {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }

    #[tokio::test]
    async fn command_is_accepted_only_from_a_file_that_nobody_else_can_change() {
        let directory = tempfile::tempdir().unwrap();
        let folder = directory.path().canonicalize().unwrap().join("lists");
        std::fs::create_dir(&folder).unwrap();
        let path = folder.join("devices.json");
        for (list, file_mode, folder_mode, expected) in [
            (WITH_COMMAND, 0o644, 0o755, None),
            (
                WITH_COMMAND,
                0o664,
                0o755,
                Some("lists/devices.json can be changed by other users (mode 0664)"),
            ),
            (
                WITH_COMMAND,
                0o646,
                0o755,
                Some("lists/devices.json can be changed by other users (mode 0646)"),
            ),
            (WITH_COMMAND, 0o644, 0o757, Some("lists can be changed by other users (mode 0757)")),
            (r#"[{"ID":"a","Addr":"h"}]"#, 0o666, 0o777, None),
        ] {
            std::fs::write(&path, list).unwrap();
            set_mode(&path, file_mode);
            set_mode(&folder, folder_mode);
            let loaded = file_source(&path, None).unwrap().load_devices().await;
            match (loaded, expected) {
                (Ok(devices), None) => assert_eq!(devices.len(), 1),
                (Err(error), Some(part)) => {
                    assert_eq!(error.class, ErrorClass::Unreadable);
                    let message = error.message;
                    assert!(message.contains("devices.json: line 1, field \"PowerCommand\": "), "{message}");
                    assert!(message.contains(part) && message.contains("chmod go-w"), "{message}");
                }
                (loaded, _) => panic!("{list} {file_mode:o} {folder_mode:o}: {loaded:?}"),
            }
        }
    }

    #[tokio::test]
    async fn list_with_the_configured_digest_is_trusted_wherever_it_is() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("devices.json");
        std::fs::write(&path, WITH_COMMAND).unwrap();
        set_mode(&path, 0o666);
        let digest = hex::encode(ring::digest::digest(&ring::digest::SHA256, WITH_COMMAND.as_bytes()));
        for configured in [digest.clone(), digest.to_uppercase()] {
            file_source(&path, Some(&configured)).unwrap().load_devices().await.unwrap();
        }
        let source = file_source(&path, Some(&digest)).unwrap();
        std::fs::write(&path, "[]").unwrap();
        let error = source.load_devices().await.unwrap_err().message;
        assert!(
            error.contains("devices.json: its SHA-256 is 4f53cda1") && error.contains(&digest),
            "{error}"
        );
        for wrong in ["", "abc", &"g".repeat(64)] {
            let error = file_source(&path, Some(wrong)).err().unwrap().message;
            assert!(error.contains("its configured SHA-256 is none; give the 64"), "{error}");
        }
    }

    #[tokio::test]
    async fn list_that_windows_saved_is_read_and_utf16_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("devices.json");
        std::fs::write(&path, b"\xef\xbb\xbf[{\"ID\":\"a\",\"Addr\":\"192.0.2.1\"}]\r\n").unwrap();
        let devices = file_source(&path, None).unwrap().load_devices().await.unwrap();
        assert_eq!(devices.len(), 1);
        let utf16: Vec<u8> = "[]".encode_utf16().flat_map(u16::to_le_bytes).collect();
        std::fs::write(&path, utf16).unwrap();
        let error = file_source(&path, None).unwrap().load_devices().await.unwrap_err().message;
        assert!(
            error.contains("devices.json: it is UTF-16") && error.contains("save it as UTF-8"),
            "{error}"
        );
    }

    #[tokio::test]
    async fn named_pipe_is_no_list() {
        let directory = tempfile::tempdir().unwrap();
        let pipe = directory.path().join("devices.json");
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        let source = file_source(&pipe, None).unwrap();
        let loaded = tokio::time::timeout(Duration::from_secs(10), source.load_devices()).await;
        // A thread that waits for a writer would keep the test from ending.
        let _writer =
            loaded.is_err().then(|| std::fs::File::options().read(true).write(true).open(&pipe).unwrap());
        let error = loaded.expect("opening the pipe waits for its writer").unwrap_err();
        assert_eq!(error.class, ErrorClass::Configuration);
        assert!(error.message.contains("it is not a file"), "{}", error.message);
    }

    #[test]
    fn path_is_checked_on_a_thread_that_may_block() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().canonicalize().unwrap().join("devices.json");
        std::fs::write(&path, "[]").unwrap();
        set_mode(&path, 0o644);
        let source = file_source(&path, None).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().max_blocking_threads(1).build().unwrap();
        runtime.block_on(async {
            let (release, released) = std::sync::mpsc::channel::<()>();
            let occupied = tokio::task::spawn_blocking(move || released.recv());
            let mut trust = std::pin::pin!(source.list_trust(b"[]"));
            assert!(futures::poll!(&mut trust).is_pending(), "the path was checked on this thread");
            release.send(()).unwrap();
            assert!(matches!(trust.await, Ok(ListTrust::Trusted)));
            occupied.await.unwrap().unwrap();
        });
    }

    #[tokio::test]
    async fn broken_edit_is_an_error_until_fixed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("devices.json");
        let source = file_source(&path, None).unwrap();
        assert_eq!(source.load_devices().await.unwrap_err().class, ErrorClass::Configuration);
        std::fs::write(&path, r#"[{"ID":"a","Addr":"h"}]"#).unwrap();
        let deadline = Instant::now() + Duration::from_mins(1);
        while !Arc::ptr_eq(&source.load_devices().await.unwrap(), &source.load_devices().await.unwrap()) {
            assert!(Instant::now() < deadline, "an unchanged file is read again and again");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        std::fs::write(&path, r#"[{"ID":"a","Addr":"h"},"#).unwrap();
        for _ in 0..2 {
            let error = source.load_devices().await.unwrap_err();
            assert_eq!(error.class, ErrorClass::Unreadable);
            assert!(error.message.contains("devices.json: line 1"), "{}", error.message);
        }
        std::fs::write(&path, r#"[{"ID":"b","Addr":"h"}]"#).unwrap();
        assert_eq!(source.load_devices().await.unwrap()[0].id, "b");
    }
}
