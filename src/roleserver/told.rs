//! The sockets on which a role server says what it does just now.
//!
//! What survives a restart is in files; how the parts of a running role server fare is known to that one alone. Whoever
//! connects to a socket of its state directory reads a page as text, and the end: the tree of its runnables from
//! `status.sock`, metrics from `metrics.sock`, and where it runs a control plane of Kubernetes what a pass over the built-in
//! objects would change, from `cluster/kubernetes/plan.sock`. Nothing can be ordered: who may read that directory, root or
//! the user it runs as, may read this.

use std::io::Read as _;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream as BlockingStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::AsyncWriteExt as _;
use tokio::net::UnixListener;

use crate::supervisor::context::{Runnable, Scope, Starting};
use crate::supervisor::report::Report;

/// Where the tree is told.
pub const STATUS: &str = "status.sock";
/// Where metrics are told.
pub const METRICS: &str = "metrics.sock";
/// Where it is told what a pass over the built-in objects would change.
pub const PLAN: &str = "plan.sock";
/// A path to a socket is shorter than this, by the kernel's `struct sockaddr_un` (unix(7)).
const LONGEST_PATH: usize = 108;
/// Whoever does not read or write for so long is left alone.
const PATIENCE: Duration = Duration::from_secs(5);
/// A disk on which no socket can be made may be well again some day.
const PAUSE: Duration = Duration::from_mins(1);

/// Says on a socket of this name what `page` makes of the tree that it belongs to, for as long as it lives.
///
/// There must be no other role server on this state directory: a socket that is there already is replaced.
#[must_use]
pub fn telling(
    directory: &Path,
    name: &'static str,
    page: impl Fn(&Report) -> String + Send + Sync + 'static,
) -> Runnable {
    let (directory, page) = (directory.to_owned(), Arc::new(page));
    Runnable::new(move |starting: Starting| {
        let (directory, page) = (directory.clone(), page.clone());
        async move {
            let healthy = starting.healthy();
            let scope = healthy.scope();
            let mut complained = false;
            loop {
                match listen(&directory, name) {
                    Ok(listener) => scope.until_cancelled(tell(&listener, scope, &*page)).await?,
                    Err(error) if !complained => {
                        tracing::warn!(%error, name, "what runs cannot be told; going on without");
                        complained = true;
                    }
                    Err(_) => {}
                }
                scope.until_cancelled(tokio::time::sleep(PAUSE)).await?;
            }
        }
    })
}

/// Says on a socket of this name what `page` comes to, each time that somebody asks, until it is dropped or nobody can ask
/// any more; one after the other.
pub async fn telling_anew<P: Future<Output = String>>(
    directory: &Path,
    name: &str,
    page: impl Fn() -> P,
) -> std::io::Result<()> {
    let listener = listen(directory, name)?;
    loop {
        let (mut stream, _) = listener.accept().await?;
        let text = page().await;
        // Whoever goes away unheard has not asked.
        let _ = tokio::time::timeout(PATIENCE, stream.write_all(text.as_bytes())).await;
    }
}

/// What the role server on this state directory says on the socket of this name. Blocks, for five seconds at the most
/// where nothing comes.
pub fn ask(directory: &Path, name: &str) -> std::io::Result<String> {
    ask_within(PATIENCE, directory, name)
}

/// The same, where it may take longer until something comes.
pub fn ask_within(patience: Duration, directory: &Path, name: &str) -> std::io::Result<String> {
    let mut stream = at(directory, name, |path| BlockingStream::connect(path))?;
    stream.set_read_timeout(Some(patience))?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text)
}

fn listen(directory: &Path, name: &str) -> std::io::Result<UnixListener> {
    at(directory, name, |path| {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        UnixListener::bind(path)
    })
}

/// Goes on until the listener fails.
async fn tell(listener: &UnixListener, scope: &Scope, page: &(dyn Fn(&Report) -> String + Send + Sync)) {
    while let Ok((mut stream, _)) = listener.accept().await {
        let text = page(&scope.report());
        // Whoever goes away unheard has not asked.
        let _ = tokio::time::timeout(PATIENCE, stream.write_all(text.as_bytes())).await;
    }
}

/// Does something at the socket's path, by a shorter way where the path is too long for a socket.
fn at<T>(directory: &Path, name: &str, act: impl FnOnce(&Path) -> std::io::Result<T>) -> std::io::Result<T> {
    let path = directory.join(name);
    if path.as_os_str().len() < LONGEST_PATH {
        return act(&path);
    }
    let opened = std::fs::File::open(directory)?;
    act(&Path::new("/proc/self/fd").join(opened.as_raw_fd().to_string()).join(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::supervisor::supervise::{Settings, Supervisor};

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn running_tree_is_told_also_from_a_directory_with_a_long_path_and_after_one_that_died() {
        let directory = tempfile::tempdir().unwrap();
        for depth in [1, 100] {
            let place = directory.path().join("a".repeat(depth));
            std::fs::create_dir(&place).unwrap();
            assert!(ask(&place, STATUS).is_err());
            for _ in 0..2 {
                let root = {
                    let place = place.clone();
                    Runnable::new(move |starting: Starting| {
                        let place = place.clone();
                        async move {
                            starting.start("status", telling(&place, STATUS, Report::to_string))?;
                            Err(starting.healthy().scope().cancelled().await.into())
                        }
                    })
                };
                // The second one finds the socket that the first has left.
                let tree = Supervisor::start(root, Settings::default());
                tree.settled().await;
                let asked = place.clone();
                let text = tokio::task::spawn_blocking(move || ask(&asked, STATUS)).await.unwrap().unwrap();
                assert_eq!(text.lines().count(), 2, "{text}");
                assert!(text.contains("└─ status  healthy"), "{text}");
                tree.stop().await;
                assert!(ask(&place, STATUS).is_err());
            }
        }
    }
}
