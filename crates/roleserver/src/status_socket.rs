//! UNIX sockets that serve status, metrics and the Kubernetes plan as text.
//!
//! What survives a restart is in files; the state of its parts is known to the running role server alone. A client that
//! connects to a socket in its state directory reads a page of text, and then the end: the tree of its runnables from
//! `status.sock`, metrics from `metrics.sock`, and on a node with a Kubernetes control plane the changes of a reconcile
//! pass over the built-in objects from `cluster/kubernetes/plan.sock`. The sockets take no commands. Any user who may
//! read that directory, root or the user it runs as, may read the pages.

use std::io::Read as _;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream as BlockingStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use supervisor::context::{Runnable, Scope, Starting};
use supervisor::report::TreeReport;
use tokio::io::AsyncWriteExt as _;
use tokio::net::UnixListener;

/// The socket that serves the tree of runnables.
pub const STATUS_SOCKET: &str = "status.sock";
/// The socket that serves the metrics.
pub const METRICS_SOCKET: &str = "metrics.sock";
/// The socket that serves the plan of a reconcile pass.
pub const PLAN_SOCKET: &str = "plan.sock";
/// Limit of a socket's path in bytes, from the kernel's `struct sockaddr_un` (unix(7)).
const MAX_SOCKET_PATH: usize = 108;
/// A client that does not read or write for this long is dropped.
const TIMEOUT: Duration = Duration::from_secs(5);
/// The pause before a retry: a disk on which no socket can be made may recover.
const RETRY_INTERVAL: Duration = Duration::from_mins(1);

/// The runnable that serves `page` of the current tree on the socket of this name.
///
/// No other role server may use this state directory: an existing socket is replaced.
#[must_use]
pub fn serve_report(
    directory: &Path,
    name: &'static str,
    page: impl Fn(&TreeReport) -> String + Send + Sync + 'static,
) -> Runnable {
    let (directory, page) = (directory.to_owned(), Arc::new(page));
    Runnable::new(move |starting: Starting| {
        let (directory, page) = (directory.clone(), page.clone());
        async move {
            let healthy = starting.mark_healthy();
            let scope = healthy.scope();
            let mut complained = false;
            loop {
                match bind_socket(&directory, name) {
                    Ok(listener) => scope.until_cancelled(answer_clients(&listener, scope, &*page)).await?,
                    Err(error) if !complained => {
                        tracing::warn!(%error, name, "a status socket cannot be opened; the agent continues without it");
                        complained = true;
                    }
                    Err(_) => {}
                }
                scope.until_cancelled(tokio::time::sleep(RETRY_INTERVAL)).await?;
            }
        }
    })
}

/// Serves `page` on the socket of this name, one client after the other, until it is dropped or the listener fails. The
/// page is rendered for each client.
pub async fn serve_page<P: Future<Output = String>>(
    directory: &Path,
    name: &str,
    page: impl Fn() -> P,
) -> std::io::Result<()> {
    let listener = bind_socket(directory, name)?;
    loop {
        let (mut stream, _) = listener.accept().await?;
        let text = page().await;
        // A client that disconnects early is not an error.
        let _ = tokio::time::timeout(TIMEOUT, stream.write_all(text.as_bytes())).await;
    }
}

/// Reads the page of the role server with this state directory from the socket of this name. Blocks, for five seconds
/// at the most if nothing comes.
pub fn read_page(directory: &Path, name: &str) -> std::io::Result<String> {
    read_page_within(TIMEOUT, directory, name)
}

/// As [`read_page`], with another time limit.
pub fn read_page_within(patience: Duration, directory: &Path, name: &str) -> std::io::Result<String> {
    let mut stream = with_socket_path(directory, name, |path| BlockingStream::connect(path))?;
    stream.set_read_timeout(Some(patience))?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text)
}

fn bind_socket(directory: &Path, name: &str) -> std::io::Result<UnixListener> {
    with_socket_path(directory, name, |path| {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        UnixListener::bind(path)
    })
}

/// Serves clients until the listener fails.
async fn answer_clients(
    listener: &UnixListener,
    scope: &Scope,
    page: &(dyn Fn(&TreeReport) -> String + Send + Sync),
) {
    while let Ok((mut stream, _)) = listener.accept().await {
        let text = page(&scope.report());
        // A client that disconnects early is not an error.
        let _ = tokio::time::timeout(TIMEOUT, stream.write_all(text.as_bytes())).await;
    }
}

/// Calls `act` with the socket's path, or with a shorter equivalent if the path is too long for a socket.
fn with_socket_path<T>(
    directory: &Path,
    name: &str,
    act: impl FnOnce(&Path) -> std::io::Result<T>,
) -> std::io::Result<T> {
    let path = directory.join(name);
    if path.as_os_str().len() < MAX_SOCKET_PATH {
        return act(&path);
    }
    let opened = std::fs::File::open(directory)?;
    act(&Path::new("/proc/self/fd").join(opened.as_raw_fd().to_string()).join(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    use supervisor::supervise::{Supervisor, SupervisorSettings};

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn status_is_served_from_long_paths_and_after_a_crash() {
        let directory = tempfile::tempdir().unwrap();
        for depth in [1, 100] {
            let place = directory.path().join("a".repeat(depth));
            std::fs::create_dir(&place).unwrap();
            assert!(read_page(&place, STATUS_SOCKET).is_err());
            for _ in 0..2 {
                let root = {
                    let place = place.clone();
                    Runnable::new(move |starting: Starting| {
                        let place = place.clone();
                        async move {
                            starting.start(
                                "status",
                                serve_report(&place, STATUS_SOCKET, TreeReport::to_string),
                            )?;
                            Err(starting.mark_healthy().scope().cancelled().await.into())
                        }
                    })
                };
                // The second one finds the socket that the first left behind.
                let tree = Supervisor::start(root, SupervisorSettings::default());
                tree.wait_quiescent().await;
                let path = place.clone();
                let text = tokio::task::spawn_blocking(move || read_page(&path, STATUS_SOCKET))
                    .await
                    .unwrap()
                    .unwrap();
                assert_eq!(text.lines().count(), 2, "{text}");
                assert!(text.contains("└─ status  healthy"), "{text}");
                tree.stop().await;
                assert!(read_page(&place, STATUS_SOCKET).is_err());
            }
        }
    }
}
