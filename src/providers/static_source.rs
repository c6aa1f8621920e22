//! Where a static device list comes from, and when it is read again.
//!
//! Every call looks whether the list changed (a file by inode, length and times,
//! a server by `ETag` or `Last-Modified`) and reads it again if so. The last good
//! list is only ever returned when the source itself says that it is unchanged.
//! When the new one cannot be read the answer is the error: going on with the
//! old list would hide a broken edit until the next restart, and would then
//! surprise at the worst time.
//!
//! Callers that come while the list is being read share the next reading. One
//! after the other, the workers of a shepherd would each wait out the time limit
//! of a server that hangs, and the last of ten for five minutes.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use reqwest::header::{ETAG, HeaderMap, HeaderValue, IF_MODIFIED_SINCE, IF_NONE_MATCH, LAST_MODIFIED};
use reqwest::{StatusCode, Url};
use tokio::io::AsyncReadExt;
use tokio::sync::Mutex;

use crate::providers::http;
use crate::providers::provider::{ErrorClass, ProviderError};
use crate::providers::static_list::{self, Device};

/// Coarser than any file system's times.
const UNSETTLED_SECONDS: i64 = 2;

/// One device list, read as often as it changes.
pub struct Source {
    place: Place,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The last good list.
    last: Option<Last>,
    /// The last reading.
    reading: Option<Reading>,
}

/// What one reading came to.
struct Reading {
    began: Instant,
    outcome: Result<Arc<Vec<Device>>, ProviderError>,
}

enum Place {
    File(PathBuf),
    Http { url: Url, client: reqwest::Client },
}

struct Last {
    version: Version,
    devices: Arc<Vec<Device>>,
}

/// What tells one version of a list from the next.
#[derive(PartialEq, Eq)]
enum Version {
    File {
        device: u64,
        inode: u64,
        length: u64,
        modified: (i64, i64),
        changed: (i64, i64),
    },
    /// A file that was changed a moment before it was read: a second change could bear the same times.
    Unsettled,
    Http {
        etag: Option<HeaderValue>,
        modified: Option<HeaderValue>,
    },
}

impl Source {
    /// Checks a list's URL; reads nothing yet.
    pub fn new(url: &str) -> Result<Self, ProviderError> {
        let wrong = |problem: &str| {
            // The text is not shown: what is no URL may still hold a password.
            ProviderError::new(
                ErrorClass::Configuration,
                "device list",
                format!("the device list's URL {problem}; give file:///path or http(s)://host/path"),
            )
        };
        let url = Url::parse(url).map_err(|error| wrong(&format!("is none ({error})")))?;
        let place = match url.scheme() {
            "file" => Place::File(url.to_file_path().map_err(|()| wrong("names no file of this host"))?),
            "http" | "https" => Place::Http { client: http::client(&url)?, url },
            scheme => return Err(wrong(&format!("begins with {scheme}:"))),
        };
        Ok(Self { place, state: Mutex::default() })
    }

    /// The endpoint that errors name.
    #[must_use]
    pub fn endpoint(&self) -> String {
        match &self.place {
            Place::File(path) => format!("file://{}", path.display()),
            Place::Http { url, .. } => http::endpoint(url),
        }
    }

    /// The list as it is now.
    pub async fn devices(&self) -> Result<Arc<Vec<Device>>, ProviderError> {
        let asked = Instant::now();
        let mut state = self.state.lock().await;
        // What was read from a later moment on is the list as it is for whoever asked before.
        if let Some(reading) = state.reading.as_ref().filter(|reading| reading.began > asked) {
            return reading.outcome.clone();
        }
        let began = Instant::now();
        let outcome = self.read(&mut state.last).await;
        state.reading = Some(Reading { began, outcome: outcome.clone() });
        outcome
    }

    async fn read(&self, last: &mut Option<Last>) -> Result<Arc<Vec<Device>>, ProviderError> {
        let read = match &self.place {
            Place::File(path) => self.read_file(path, last.as_ref()).await?,
            Place::Http { url, client } => self.read_http(url, client, last.as_ref()).await?,
        };
        match (read, &*last) {
            (None, Some(last)) => Ok(Arc::clone(&last.devices)),
            (None, None) => {
                Err(self.error(ErrorClass::Unreadable, "the server says that it has not changed, unasked"))
            }
            (Some((version, text)), _) => {
                // Forgotten first: if this one is broken, "unchanged" must not bring the old one back.
                *last = None;
                let text = String::from_utf8(text).map_err(|error| {
                    self.error(ErrorClass::Unreadable, &format!("it is not UTF-8: {error}"))
                })?;
                let devices = static_list::parse(&text)
                    .map_err(|error| self.error(ErrorClass::Unreadable, &error.to_string()))?;
                let devices = Arc::new(devices);
                *last = Some(Last { version, devices: Arc::clone(&devices) });
                Ok(devices)
            }
        }
    }

    async fn read_file(
        &self,
        path: &Path,
        last: Option<&Last>,
    ) -> Result<Option<(Version, Vec<u8>)>, ProviderError> {
        let failed = |error: std::io::Error| {
            use std::io::ErrorKind::{IsADirectory, NotFound, PermissionDenied};
            let class = match error.kind() {
                NotFound | PermissionDenied | IsADirectory => ErrorClass::Configuration,
                _ => ErrorClass::Transient,
            };
            self.error(class, &format!("it cannot be read: {error}"))
        };
        let file = tokio::fs::File::open(path).await.map_err(failed)?;
        let found = file.metadata().await.map_err(failed)?;
        if !found.is_file() {
            return Err(self.error(ErrorClass::Configuration, "it is not a file"));
        }
        let mut version = Version::File {
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
        if i64::try_from(now).is_ok_and(|now| now - found.ctime() <= UNSETTLED_SECONDS) {
            version = Version::Unsettled;
        }
        let mut text = Vec::new();
        let limit = http::ANSWER_LIMIT_BYTES as u64;
        file.take(limit + 1).read_to_end(&mut text).await.map_err(failed)?;
        if text.len() as u64 > limit {
            return Err(self.error(ErrorClass::Unreadable, &format!("it is larger than {limit} bytes")));
        }
        Ok(Some((version, text)))
    }

    async fn read_http(
        &self,
        url: &Url,
        client: &reqwest::Client,
        last: Option<&Last>,
    ) -> Result<Option<(Version, Vec<u8>)>, ProviderError> {
        let mut request = client.get(url.clone());
        if let Some(Last { version: Version::Http { etag, modified }, .. }) = last {
            if let Some(etag) = etag {
                request = request.header(IF_NONE_MATCH, etag);
            } else if let Some(modified) = modified {
                request = request.header(IF_MODIFIED_SINCE, modified);
            }
        }
        let response = request.send().await.map_err(|error| http::failed(url, &error))?;
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
            return Err(self.error(class, &format!("the server answered {status}")));
        }
        let header = |headers: &HeaderMap, name| headers.get(name).cloned();
        let version = Version::Http {
            etag: header(response.headers(), ETAG),
            modified: header(response.headers(), LAST_MODIFIED),
        };
        Ok(Some((version, http::body(response, url).await?)))
    }

    fn error(&self, class: ErrorClass, problem: &str) -> ProviderError {
        let shown = match &self.place {
            Place::File(path) => path.display().to_string(),
            Place::Http { url, .. } => http::shown(url),
        };
        ProviderError::new(class, self.endpoint(), format!("the device list {shown}: {problem}"))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_url_of_another_kind_is_refused() {
        for (url, part) in [
            ("/etc/devices.json", "is none"),
            ("ftp://h/devices.json", "begins with ftp:"),
            ("file://elsewhere/devices.json", "names no file of this host"),
        ] {
            let error = Source::new(url).err().unwrap();
            assert_eq!(error.class, ErrorClass::Configuration);
            assert!(error.sentence.contains(part), "{}", error.sentence);
        }
    }

    #[tokio::test]
    async fn a_broken_edit_is_an_error_until_it_is_mended() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("devices.json");
        let source = Source::new(&format!("file://{}", path.display())).unwrap();
        assert_eq!(source.devices().await.unwrap_err().class, ErrorClass::Configuration);
        std::fs::write(&path, r#"[{"ID":"a","Addr":"h"}]"#).unwrap();
        let deadline = Instant::now() + Duration::from_mins(1);
        while !Arc::ptr_eq(&source.devices().await.unwrap(), &source.devices().await.unwrap()) {
            assert!(Instant::now() < deadline, "an unchanged file is read again and again");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        std::fs::write(&path, r#"[{"ID":"a","Addr":"h"},"#).unwrap();
        for _ in 0..2 {
            let error = source.devices().await.unwrap_err();
            assert_eq!(error.class, ErrorClass::Unreadable);
            assert!(error.sentence.contains("devices.json: line 1"), "{}", error.sentence);
        }
        std::fs::write(&path, r#"[{"ID":"b","Addr":"h"}]"#).unwrap();
        assert_eq!(source.devices().await.unwrap()[0].id, "b");
    }
}
