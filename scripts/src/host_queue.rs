//! Which URL is fetched next: in order, but never too many from one server at a time.

use std::collections::{HashMap, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Items that are looked at for one whose server is free.
const LOOK_AHEAD: usize = 10_000;

/// Numbers of URLs that wait. Shared by the threads that fetch.
pub(crate) struct HostQueue<'a> {
    urls: &'a [&'a str],
    per_host: usize,
    state: Mutex<State<'a>>,
    changed: Condvar,
}

struct State<'a> {
    /// Nobody has taken these, in order.
    waiting: VecDeque<usize>,
    /// Fetches from each server.
    active: HashMap<&'a str, usize>,
    /// First item that may not be taken yet.
    horizon: usize,
}

/// An item that is being fetched. Its server is free again when it is dropped.
pub(crate) struct Turn<'q, 'a> {
    /// Number of the URL.
    pub(crate) item: usize,
    queue: &'q HostQueue<'a>,
}

impl<'a> HostQueue<'a> {
    /// A queue of the items `waiting`, with at most `per_host` fetches from a server.
    pub(crate) fn new(urls: &'a [&'a str], waiting: VecDeque<usize>, per_host: usize) -> Self {
        let state = State { waiting, active: HashMap::new(), horizon: usize::MAX };
        Self { urls, per_host: per_host.max(1), state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Items from `horizon` on are held back.
    pub(crate) fn set_horizon(&self, horizon: usize) {
        self.lock().horizon = horizon;
        self.changed.notify_all();
    }

    /// Nothing more is taken.
    pub(crate) fn close(&self) {
        self.lock().waiting.clear();
        self.changed.notify_all();
    }

    /// The next item whose server is free; waits for one. `None` when there is no item left.
    pub(crate) fn take(&self) -> Option<Turn<'_, 'a>> {
        let mut state = self.lock();
        loop {
            if state.waiting.is_empty() {
                return None;
            }
            let free = state.waiting.iter().take(LOOK_AHEAD).position(|item| {
                let active = state.active.get(host_of(self.urls[*item]));
                *item < state.horizon && active.is_none_or(|n| *n < self.per_host)
            });
            if let Some(item) = free.and_then(|at| state.waiting.remove(at)) {
                *state.active.entry(host_of(self.urls[item])).or_default() += 1;
                return Some(Turn { item, queue: self });
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<'a>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Turn<'_, '_> {
    fn drop(&mut self) {
        let host = host_of(self.queue.urls[self.item]);
        let mut state = self.queue.lock();
        if let Some(n) = state.active.get_mut(host) {
            *n -= 1;
            if *n == 0 {
                state.active.remove(host);
            }
        }
        drop(state);
        self.queue.changed.notify_all();
    }
}

/// The server that a URL names, as it is written. What is no URL fails when it is fetched.
fn host_of(url: &str) -> &str {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    rest.split(['/', '?', '#']).next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_server_is_passed_over_and_order_holds_otherwise() {
        let urls = ["http://a/1", "http://a/2", "http://a/3", "http://b/1", "c", "http://b?x"];
        let queue = HostQueue::new(&urls, (0..6).collect(), 2);
        queue.set_horizon(5);
        let item = |turn: &Option<Turn<'_, '_>>| turn.as_ref().expect("an item").item;
        let first = queue.take();
        let others = [queue.take(), queue.take(), queue.take()];
        assert_eq!((item(&first), others.each_ref().map(item)), (0, [1, 3, 4]));
        drop(first);
        let third = queue.take();
        assert_eq!(item(&third), 2);
        // The last one lies behind the horizon.
        queue.set_horizon(6);
        assert_eq!(item(&queue.take()), 5);
        assert!(queue.take().is_none());
    }

    #[test]
    fn threads_that_wait_are_let_go() {
        let urls = ["http://a/1", "http://a/2"];
        let queue = HostQueue::new(&urls, (0..2).collect(), 1);
        let first = queue.take();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| queue.take().is_none());
            queue.close();
            assert!(waiting.join().expect("no panic"));
        });
        drop(first);
    }
}
