//! Resumable HTTP downloads.
//!
//! No transport security is needed: a download counts as an artefact only if its digest is right. So there is no TLS.
//! Redirects are not followed either, because the declaration names the location of the file.

use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Empty};
use hyper::header::{ACCEPT, CONTENT_RANGE, HOST, RANGE, USER_AGENT};
use hyper::{Request, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use model::excerpt::{Excerpt, with_excerpt};
use tokio::fs::{File, OpenOptions};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

/// Time without any progress after which an attempt is given up: for the connection, the response head and each part of
/// the body.
const TIMEOUT: Duration = Duration::from_secs(30);
/// How much of the body of an error is read, and for how long.
const EXCERPT_BYTES: usize = 4096;
const EXCERPT_TIMEOUT: Duration = Duration::from_secs(2);
/// Largest file that is fetched, in bytes.
pub(crate) const MAX_FILE_BYTES: u64 = 16 << 30;

/// Completes the download at `path`, whatever part of it exists, and returns the length. The error is a sentence; what
/// was fetched until then stays.
///
/// Cancel safe: only the connection is lost.
pub async fn fetch_file(url: &str, path: &Path) -> Result<u64, String> {
    let failed = |what: &str| format!("fetching {url} failed: {what}");
    let uri: Uri = url.parse().map_err(|_| failed("it is no URL"))?;
    let (host, port) = (uri.host().unwrap_or_default(), uri.port_u16().unwrap_or(80));
    let at = format!("{host}:{port}");
    let in_time = |what: &'static str| format!("fetching {url} failed: {what} for {} s", TIMEOUT.as_secs());
    let stream = tokio::time::timeout(TIMEOUT, TcpStream::connect(&at))
        .await
        .map_err(|_| in_time("the connection was not accepted"))?
        .map_err(|error| failed(&error.to_string()))?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .map_err(|error| failed(&error.to_string()))?;
    let serving = tokio::spawn(connection);
    let _end = AbortOnDrop(serving.abort_handle());

    let mut there = tokio::fs::metadata(path).await.map_or(0, |data| data.len());
    let request = Request::get(uri.path_and_query().map_or("/", |path| path.as_str()))
        .header(HOST, &at)
        .header(USER_AGENT, "roleserver")
        .header(ACCEPT, "*/*")
        .header(RANGE, format!("bytes={there}-"))
        .body(Empty::<Bytes>::new())
        .map_err(|error| failed(&error.to_string()))?;
    let answer = tokio::time::timeout(TIMEOUT, sender.send_request(request))
        .await
        .map_err(|_| in_time("there was no answer"))?
        .map_err(|error| failed(&error.to_string()))?;
    let begins =
        answer.headers().get(CONTENT_RANGE).and_then(|range| range.to_str().ok()).and_then(range_start);
    match answer.status() {
        StatusCode::PARTIAL_CONTENT if begins == Some(there) => {}
        // The server has no more bytes than the file.
        StatusCode::RANGE_NOT_SATISFIABLE if there > 0 => return Ok(there),
        StatusCode::OK => there = 0,
        status => {
            let words = read_excerpt(answer.into_body()).await;
            let what = with_excerpt(format_args!("the server answered {status}"), words.as_ref());
            return Err(failed(&what));
        }
    }
    let mut file = open_at_offset(path, there).await.map_err(|error| failed(&error.to_string()))?;
    let received = receive_body(answer.into_body(), &mut file, &mut there).await;
    // Whatever ended it: flush first, so that the length of the file is right for the next attempt.
    file.flush().await.map_err(|error| failed(&error.to_string()))?;
    received.map_err(|what| failed(&what))?;
    file.sync_all().await.map_err(|error| failed(&error.to_string()))?;
    Ok(there)
}

/// The beginning of the body of an error.
async fn read_excerpt(mut body: hyper::body::Incoming) -> Option<Excerpt> {
    let mut bytes = Vec::new();
    let reading = async {
        while bytes.len() < EXCERPT_BYTES
            && let Some(Ok(frame)) = body.frame().await
        {
            if let Some(data) = frame.data_ref() {
                bytes.extend_from_slice(&data[..data.len().min(EXCERPT_BYTES)]);
            }
        }
    };
    let _in_time = tokio::time::timeout(EXCERPT_TIMEOUT, reading).await;
    Excerpt::from_body(&bytes)
}

/// Writes the body to the file, and adds its length to `there`. The error is part of a sentence.
async fn receive_body(
    mut body: hyper::body::Incoming,
    file: &mut File,
    there: &mut u64,
) -> Result<(), String> {
    loop {
        let frame = tokio::time::timeout(TIMEOUT, body.frame())
            .await
            .map_err(|_| format!("nothing more came for {} s", TIMEOUT.as_secs()))?;
        let Some(frame) = frame else { return Ok(()) };
        let frame = frame.map_err(|error| error.to_string())?;
        let Some(data) = frame.data_ref() else { continue };
        *there += data.len() as u64;
        if *there > MAX_FILE_BYTES {
            return Err(format!("it is larger than {MAX_FILE_BYTES} bytes"));
        }
        file.write_all(data).await.map_err(|error| error.to_string())?;
    }
}

/// Opens a file for writing after its first `there` bytes, and truncates the rest.
pub(crate) async fn open_at_offset(path: &Path, there: u64) -> std::io::Result<File> {
    let mut options = OpenOptions::new();
    let file = options.write(true).create(true).truncate(false).mode(0o600).open(path).await?;
    file.set_len(there).await?;
    let mut file = file;
    tokio::io::AsyncSeekExt::seek(&mut file, std::io::SeekFrom::End(0)).await?;
    Ok(file)
}

/// The first position in a range such as `bytes 7-9/10` (RFC 9110, 14.4).
fn range_start(range: &str) -> Option<u64> {
    range.strip_prefix("bytes ")?.split_once('-')?.0.trim().parse().ok()
}

/// Aborts a task when it is dropped.
struct AbortOnDrop(tokio::task::AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    use std::sync::{Arc, Mutex};

    use tokio::io::AsyncReadExt as _;
    use tokio::net::TcpListener;

    /// Serves one file, and closes each connection after `most` bytes of it. Returns the URL and the list of requested
    /// ranges.
    pub(crate) async fn serve_file(content: Vec<u8>, most: usize) -> (String, Arc<Mutex<Vec<String>>>) {
        serve_file_at("127.0.0.1:0", content, most).await
    }

    /// The same at this address.
    async fn serve_file_at(
        address: &str,
        content: Vec<u8>,
        most: usize,
    ) -> (String, Arc<Mutex<Vec<String>>>) {
        let listener = TcpListener::bind(address).await.unwrap();
        let url = format!("http://{}/file", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let messages = requests.clone();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut request = Vec::new();
                while !request.ends_with(b"\r\n\r\n") && stream.read_buf(&mut request).await.unwrap_or(0) > 0
                {
                }
                let text = String::from_utf8_lossy(&request).to_lowercase();
                let range = text.lines().find_map(|line| line.strip_prefix("range: ")).unwrap_or_default();
                messages.lock().unwrap().push(range.to_owned());
                let from: usize = range.trim_start_matches("bytes=").trim_end_matches('-').parse().unwrap();
                let size = content.len();
                let head = if from >= size {
                    format!("HTTP/1.1 416 No\r\nContent-Range: bytes */{size}\r\nContent-Length: 0\r\n\r\n")
                } else {
                    format!(
                        "HTTP/1.1 206 Part\r\nContent-Range: bytes {from}-{}/{size}\r\nContent-Length: {}\r\n\r\n",
                        size - 1,
                        size - from
                    )
                };
                let _ = stream.write_all(head.as_bytes()).await;
                let _ = stream.write_all(&content[from.min(size)..size.min(from + most)]).await;
            }
        });
        (url, requests)
    }

    #[tokio::test]
    async fn file_is_fetched_from_an_ipv6_address() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let (url, _) = serve_file_at("[::1]:0", vec![7; 100], 100).await;
        assert!(url.starts_with("http://[::1]:"), "{url}");
        assert_eq!(fetch_file(&url, &path).await, Ok(100));
    }

    #[tokio::test]
    async fn interrupted_download_resumes_where_it_ended() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let content: Vec<u8> = (0..=255).cycle().take(10_000).collect();
        let (url, requests) = serve_file(content.clone(), 4000).await;
        for length in [4000, 8000] {
            assert!(fetch_file(&url, &path).await.is_err(), "it breaks off");
            assert_eq!(std::fs::metadata(&path).unwrap().len(), length);
        }
        assert_eq!(fetch_file(&url, &path).await, Ok(10_000));
        assert_eq!(fetch_file(&url, &path).await, Ok(10_000), "all of it is there");
        assert_eq!(std::fs::read(&path).unwrap(), content);
        let requests = requests.lock().unwrap().clone();
        assert_eq!(requests, ["bytes=0-", "bytes=4000-", "bytes=8000-", "bytes=10000-"]);
    }

    #[tokio::test]
    async fn server_without_ranges_sends_the_whole_file_again() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        std::fs::write(&path, "something longer").unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/file", listener.local_addr().unwrap());
        tokio::spawn(async move {
            for answer in [
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
                "HTTP/1.1 206 Part\r\nContent-Range: bytes 1-2/3\r\nContent-Length: 2\r\n\r\nbc",
                "HTTP/1.1 302 Found\r\nLocation: /b\r\nContent-Length: 0\r\n\r\n",
            ] {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut request = vec![0; 4000];
                let _ = stream.read(&mut request).await;
                let _ = stream.write_all(answer.as_bytes()).await;
            }
        });
        assert_eq!(fetch_file(&url, &path).await, Ok(3));
        assert_eq!(std::fs::read(&path).unwrap(), b"abc");
        // A range that was not requested, and a redirect.
        for part in ["206", "302"] {
            let error = fetch_file(&url, &path).await.unwrap_err();
            assert!(error.contains(part), "{error}");
        }
        assert_eq!(std::fs::read(&path).unwrap(), b"abc");
    }
}
