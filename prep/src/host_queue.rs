//! Queue of URLs to fetch: in order, with a limit on concurrent fetches from one server.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Queue of the numbers of waiting URLs. Shared by the threads that fetch.
pub(crate) struct HostQueue<'a> {
    urls: &'a [&'a str],
    per_host: usize,
    state: Mutex<State<'a>>,
    changed: Condvar,
}

#[derive(Default)]
struct State<'a> {
    hosts: HashMap<&'a str, Host>,
    /// Servers with a free slot, by the first item that waits for each.
    free: BTreeSet<(usize, &'a str)>,
    n_waiting: usize,
    /// First item that may not be taken yet.
    horizon: usize,
}

#[derive(Default)]
struct Host {
    /// Items that have not been taken, in order.
    waiting: VecDeque<usize>,
    n_active: usize,
}

/// An item that is being fetched. Dropping it frees a slot of its server.
pub(crate) struct Turn<'q, 'a> {
    /// Number of the URL.
    pub(crate) item: usize,
    queue: &'q HostQueue<'a>,
}

impl<'a> HostQueue<'a> {
    /// Creates a queue of the items `waiting`, with at most `per_host` concurrent fetches from a
    /// server.
    pub(crate) fn new(
        urls: &'a [&'a str],
        waiting: impl IntoIterator<Item = usize>,
        per_host: usize,
    ) -> Self {
        let mut state = State { horizon: usize::MAX, ..State::default() };
        for item in waiting {
            state.hosts.entry(host_name(urls[item])).or_default().waiting.push_back(item);
            state.n_waiting += 1;
        }
        state.free = state.hosts.iter().map(|(name, host)| (host.waiting[0], *name)).collect();
        Self { urls, per_host: per_host.max(1), state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Prevents items from `horizon` on from being taken.
    pub(crate) fn set_horizon(&self, horizon: usize) {
        self.lock().horizon = horizon;
        self.changed.notify_all();
    }

    /// Empties the queue; [`take`](Self::take) returns `None` from now on.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        state.n_waiting = 0;
        state.free.clear();
        drop(state);
        self.changed.notify_all();
    }

    /// Takes the next item whose server is free; waits for one. Returns `None` if no item is left.
    pub(crate) fn take(&self) -> Option<Turn<'_, 'a>> {
        let mut state = self.lock();
        loop {
            if state.n_waiting == 0 {
                return None;
            }
            let first = state.free.first().copied().filter(|(item, _)| *item < state.horizon);
            if let Some((item, name)) = first {
                state.free.pop_first();
                state.n_waiting -= 1;
                if let Some(host) = state.hosts.get_mut(name) {
                    host.waiting.pop_front();
                    host.n_active += 1;
                }
                state.offer(name, self.per_host);
                if state.n_waiting == 0 {
                    // No item is left for the threads that wait.
                    self.changed.notify_all();
                }
                return Some(Turn { item, queue: self });
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<'a>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<'a> State<'a> {
    /// Adds a server to the free ones, if it has a free slot and an item waits for it.
    fn offer(&mut self, name: &'a str, per_host: usize) {
        let Some(host) = self.hosts.get(name).filter(|host| host.n_active < per_host) else { return };
        // After `close` nothing is offered any more.
        if let Some(item) = host.waiting.front().filter(|_| self.n_waiting > 0) {
            self.free.insert((*item, name));
        }
    }
}

impl Drop for Turn<'_, '_> {
    fn drop(&mut self) {
        let name = host_name(self.queue.urls[self.item]);
        let mut state = self.queue.lock();
        if let Some(host) = state.hosts.get_mut(name) {
            host.n_active -= 1;
        }
        state.offer(name, self.queue.per_host);
        drop(state);
        self.queue.changed.notify_one();
    }
}

/// Returns the server that a URL names, as written. Text that is not a URL fails when it is
/// fetched.
fn host_name(url: &str) -> &str {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    rest.split(['/', '?', '#']).next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_of_busy_servers_are_skipped_and_others_are_taken_in_order() {
        let urls = ["http://a/1", "http://a/2", "http://a/3", "http://b/1", "c", "http://b?x"];
        let queue = HostQueue::new(&urls, 0..6, 2);
        queue.set_horizon(5);
        let first = queue.take().expect("an item");
        let others = [queue.take(), queue.take(), queue.take()].map(|turn| turn.expect("an item"));
        assert_eq!(first.item, 0);
        assert_eq!(others.each_ref().map(|turn| turn.item), [1, 3, 4]);
        drop(first);
        let third = queue.take().expect("an item");
        assert_eq!(third.item, 2);
        // The last item is behind the horizon.
        queue.set_horizon(6);
        assert_eq!(queue.take().expect("an item").item, 5);
        assert!(queue.take().is_none());
    }

    #[test]
    fn closing_wakes_waiting_threads() {
        let urls = ["http://a/1", "http://a/2"];
        let queue = HostQueue::new(&urls, 0..2, 1);
        let first = queue.take();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| queue.take().is_none());
            queue.close();
            assert!(waiting.join().expect("no panic"));
        });
        drop(first);
    }
}
