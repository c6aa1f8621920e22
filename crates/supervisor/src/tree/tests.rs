use super::*;

const NOW: Duration = Duration::from_secs(100);

struct Bench {
    tree: Tree<()>,
    runs: BTreeMap<String, RunId>,
}

/// With it, the delays are the nominal ones.
fn full_roll() -> f64 {
    1.0
}

impl Bench {
    fn new() -> Self {
        let (tree, root) = Tree::new((), ExponentialBackoff::DEFAULT, NOW);
        Self { tree, runs: [("root".to_owned(), root)].into() }
    }

    fn path(&self, slot: usize) -> String {
        self.tree.slots[slot].as_ref().unwrap().path.to_string()
    }

    /// Starts a group at `parent`: names separated by spaces.
    fn group(&mut self, parent: &str, names: &str) -> &mut Self {
        let members = names.split(' ').map(|name| (RunnableName::new(name).unwrap(), ())).collect();
        let (runs, _) = self.tree.add_children(self.runs[parent], members, NOW).unwrap();
        for (run, name) in runs.into_iter().zip(names.split(' ')) {
            self.runs.insert(format!("{parent}.{name}"), run);
        }
        self
    }

    fn healthy(&mut self, path: &str) -> &mut Self {
        self.tree.mark_healthy(self.runs[path], NOW);
        self
    }

    /// Ends a run; returns the cancelled runs (`-`) and the started ones with their delay in milliseconds (`+`).
    fn end(&mut self, path: &str, end: ExitReason) -> String {
        let effects = self.tree.record_exit(self.runs[path], end, NOW, &mut full_roll);
        self.describe_effects(&effects)
    }

    fn describe_effects(&mut self, effects: &Effects) -> String {
        let mut messages: Vec<_> =
            effects.cancel.iter().map(|slot| format!("-{}", self.path(*slot))).collect();
        for start in &effects.start {
            let path = self.path(start.run.slot);
            self.runs.insert(path.clone(), start.run);
            messages.push(format!("+{path} {}", start.delay.as_millis()));
        }
        messages.join(", ")
    }

    fn dead(&mut self, path: &str) -> String {
        self.end(path, ExitReason::Dead("broken".to_owned()))
    }

    fn cancelled(&mut self, path: &str) -> String {
        self.end(path, ExitReason::Cancelled)
    }

    fn done(&mut self, path: &str) -> String {
        self.tree.mark_done(self.runs[path]);
        self.end(path, ExitReason::Done)
    }

    fn states(&self) -> String {
        let report = self.tree.report(NOW);
        let messages: Vec<_> =
            report.entries.iter().map(|e| format!("{} {}", e.path, e.state.as_str())).collect();
        messages.join(", ")
    }
}

#[test]
fn single_death_restarts_only_that_node_after_its_backoff() {
    let mut bench = Bench::new();
    bench.group("root", "a").group("root", "b").healthy("root");
    assert_eq!(bench.dead("root.a"), "-root.a, +root.a 500");
    assert_eq!(bench.states(), "root healthy, root.a new, root.b new");
    assert_eq!(bench.dead("root.a"), "-root.a, +root.a 750");
    bench.healthy("root.a");
    assert_eq!(bench.dead("root.a"), "-root.a, +root.a 500", "it was healthy in between");
}

#[test]
fn group_restarts_with_its_dead_member_and_only_that_backs_off() {
    let mut bench = Bench::new();
    bench.group("root", "a b").group("root", "c").healthy("root.b");
    assert_eq!(bench.dead("root.a"), "-root.a, -root.b, +root.a 500");
    // No barrier: each restarts as soon as it has returned.
    assert_eq!(bench.cancelled("root.b"), "+root.b 0");
    assert_eq!(bench.states(), "root new, root.a new, root.b new, root.c new");
}

#[test]
fn nothing_restarts_before_its_whole_subtree_has_exited() {
    let mut bench = Bench::new();
    bench.group("root", "a").group("root.a", "b").group("root.a.b", "c d");
    assert_eq!(bench.dead("root.a"), "-root.a");
    assert_eq!(bench.cancelled("root.a.b"), "");
    assert_eq!(bench.tree.report(NOW).entries[1].waits_for.as_deref(), Some("root.a.b.c"));
    assert_eq!(bench.cancelled("root.a.b.c"), "");
    assert_eq!(bench.tree.report(NOW).entries[1].waits_for.as_deref(), Some("root.a.b.d"));
    // It failed after its cancellation: that does not count, because it is removed.
    assert_eq!(bench.dead("root.a.b.d"), "+root.a 500");
    assert_eq!(bench.states(), "root new, root.a new");
    assert_eq!(bench.tree.len(), 2);
}

#[test]
fn done_node_keeps_its_children_and_restarts_only_with_its_group() {
    let mut bench = Bench::new();
    bench.group("root", "a b").group("root.a", "c").healthy("root.a");
    assert_eq!(bench.done("root.a"), "");
    assert_eq!(bench.states(), "root new, root.a done, root.a.c new, root.b new");
    assert_eq!(bench.dead("root.b"), "-root.a, -root.b, +root.b 500");
    assert_eq!(bench.cancelled("root.a.c"), "+root.a 0");
}

#[test]
fn done_one_without_children_starts_at_once_when_its_group_dies() {
    let mut bench = Bench::new();
    bench.group("root", "a b").healthy("root.a");
    bench.done("root.a");
    assert_eq!(bench.dead("root.b"), "-root.a, -root.b, +root.a 0, +root.b 500");
}

#[test]
fn exit_of_a_done_or_cancelled_node_leaves_its_group_alone() {
    let mut bench = Bench::new();
    bench.group("root", "a b").group("root", "c").healthy("root.a");
    assert_eq!(bench.done("root.a"), "");
    assert_eq!(bench.dead("root"), "-root");
    assert_eq!(bench.cancelled("root.b"), "");
    assert_eq!(bench.cancelled("root.c"), "+root 500");
}

#[test]
fn dead_child_backs_off_only_while_its_parent_runs() {
    let mut bench = Bench::new();
    bench.group("root", "a").group("root.a", "b").healthy("root.a");
    assert_eq!(bench.dead("root.a.b"), "-root.a.b, +root.a.b 500");
    assert_eq!(bench.dead("root.a"), "-root.a");
    // A run that waited for its back-off goes straight to cancelled.
    assert_eq!(bench.cancelled("root.a.b"), "+root.a 500");
}

#[test]
fn exit_of_a_finished_run_has_no_effect() {
    let mut bench = Bench::new();
    bench.group("root", "a");
    let first = bench.runs["root.a"];
    bench.dead("root.a");
    let effects = bench.tree.record_exit(first, ExitReason::Dead("late".to_owned()), NOW, &mut full_roll);
    assert_eq!(effects, Effects::default());
    assert_eq!(bench.tree.mark_healthy(first, NOW), Effects::default());
    assert!(bench.tree.is_cancelled(first));
    assert_eq!(bench.tree.add_children(first, Vec::new(), NOW), Err(AddChildError::ParentCancelled));
    assert!(!bench.tree.is_cancelled(bench.runs["root.a"]));
}

#[test]
fn children_are_started_by_new_ones_under_names_of_their_own() {
    let mut bench = Bench::new();
    bench.group("root", "a").group("root", "b");
    let (root, a) = (bench.runs["root"], bench.runs["root.a"]);
    let name = |name| (RunnableName::new(name).unwrap(), ());
    let twice = |name| {
        Err(AddChildError::DuplicateName { path: "root".into(), name: RunnableName::new(name).unwrap() })
    };
    assert_eq!(bench.tree.add_children(root, vec![name("b")], NOW), twice("b"));
    assert_eq!(bench.tree.add_children(root, vec![name("c"), name("c")], NOW), twice("c"));
    assert_eq!(bench.states(), "root new, root.a new, root.b new", "all or none");
    bench.healthy("root");
    assert_eq!(bench.tree.add_children(root, vec![name("d")], NOW), Err(AddChildError::ParentCancelled));
    bench.dead("root");
    assert_eq!(
        bench.tree.add_children(a, vec![name("d")], NOW),
        Err(AddChildError::ParentCancelled),
        "its parent is dead"
    );
}

#[test]
fn closed_tree_starts_nothing_again() {
    let mut bench = Bench::new();
    bench.group("root", "a b").group("root.a", "c");
    let effects = bench.tree.close();
    assert_eq!(bench.describe_effects(&effects), "-root");
    for path in ["root.a", "root", "root.a.c"] {
        assert_eq!(bench.cancelled(path), "");
    }
    assert_eq!(bench.dead("root.b"), "");
    assert_eq!(bench.tree.slots[0].as_ref().unwrap().running_below, 0);
}

#[test]
fn slots_of_removed_nodes_are_reused() {
    let mut bench = Bench::new();
    for _ in 0..50 {
        bench.group("root", "a b c d").group("root.a", "e f g");
        for path in ["root.a", "root.b", "root.c", "root.d", "root.a.e", "root.a.f"] {
            bench.cancelled(path);
        }
        bench.dead("root");
        assert_eq!(bench.tree.len(), 8);
        assert!(bench.cancelled("root.a.g").starts_with("+root "));
        assert_eq!(bench.tree.len(), 1);
    }
    assert_eq!(bench.tree.slots.len(), 8);
}

/// Every event of random trees, in random order: no run starts while it is running.
#[test]
fn no_run_starts_while_an_earlier_one_or_its_subtree_runs() {
    use rand::rngs::SmallRng;
    use rand::{RngExt as _, SeedableRng as _};
    for seed in 0..200 {
        let mut random = SmallRng::seed_from_u64(seed);
        let (mut tree, root) = Tree::new((), ExponentialBackoff::DEFAULT, NOW);
        let mut running = vec![(root, "root".to_owned())];
        for step in 0..300 {
            let chosen = random.random_range(0..running.len());
            let (run, path) = running[chosen].clone();
            let effects = match random.random_range(0..6) {
                0 | 1 => {
                    let names = (0..random.random_range(1..4))
                        .map(|number| (RunnableName::new(&format!("n{step}-{number}")).unwrap(), ()))
                        .collect::<Vec<_>>();
                    match tree.add_children(run, names.clone(), NOW) {
                        Ok((runs, effects)) => {
                            running.extend(
                                runs.into_iter()
                                    .zip(names)
                                    .map(|(run, (name, ()))| (run, format!("{path}.{name}"))),
                            );
                            effects
                        }
                        Err(_) => continue,
                    }
                }
                2 => tree.mark_healthy(run, NOW),
                kind => {
                    running.swap_remove(chosen);
                    let end = match kind {
                        3 if tree.is_cancelled(run) => ExitReason::Cancelled,
                        4 => ExitReason::Done,
                        _ => ExitReason::Dead("broken".to_owned()),
                    };
                    tree.record_exit(run, end, NOW, &mut full_roll)
                }
            };
            for start in effects.start {
                let path = tree.slots[start.run.slot].as_ref().unwrap().path.to_string();
                let below = format!("{path}.");
                for (_, other) in &running {
                    assert!(
                        *other != path && !other.starts_with(&below),
                        "seed {seed}: {path} beside {other}"
                    );
                }
                running.push((start.run, path));
            }
            // All of them are done: nothing more happens in this tree.
            if running.is_empty() {
                break;
            }
            let counted = tree.slots[0].as_ref().unwrap().running_below;
            assert_eq!(counted, running.len(), "seed {seed}");
        }
        // Every cancelled run returns: then no returned run is left waiting.
        for _ in 0..10_000 {
            let requested = running.iter().position(|(run, _)| tree.is_cancelled(*run));
            let Some(requested) = requested else { break };
            let (run, _) = running.swap_remove(requested);
            for start in tree.record_exit(run, ExitReason::Cancelled, NOW, &mut full_roll).start {
                running.push((start.run, String::new()));
            }
        }
        let waiting = tree.report(NOW).entries.into_iter().filter(|entry| entry.waits_for.is_some()).count();
        assert_eq!(waiting, 0, "seed {seed}");
    }
}
