//! The sizes of an operation whose kernels are checked when they are first used, with the states of
//! their checks.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Mutex, MutexGuard, PoisonError};

use cubecl::client::Client;
use cubecl_common::device::DeviceId;

use crate::product_kernels::{self, Checked, Finding, ProductReport, State};

/// A size of an operation.
pub(super) trait Size: Copy + Eq + Hash {
    /// Returns a description for messages and reports.
    fn describe(&self) -> String;
}

/// The plan of a size, or the reason why there is none.
#[derive(Debug)]
enum Status<P> {
    /// It is computed by the plan.
    Planned { plan: P, state: State },
    /// There are no kernels for it.
    Refused(String),
    /// Results were wrong.
    Wrong(String),
}

/// The sizes of an operation on all devices, each with a plan of type `P`.
pub(super) struct Sizes<S, P> {
    /// Whose kernels compute them, for messages.
    by: &'static str,
    statuses: Mutex<HashMap<(DeviceId, S), Status<P>>>,
}

impl<S: Size, P: Clone> Sizes<S, P> {
    pub(super) fn new(by: &'static str) -> Self {
        Self { by, statuses: Mutex::default() }
    }

    /// Locks the statuses, which are valid after each of the changes below.
    fn lock(&self) -> MutexGuard<'_, HashMap<(DeviceId, S), Status<P>>> {
        self.statuses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the plan of a size, which `make` makes when it is first used; `None` if the next
    /// kernels in order of preference compute it.
    pub(super) fn plan(
        &self,
        client: &Client,
        size: &S,
        make: impl FnOnce() -> Result<P, String>,
    ) -> Option<P> {
        let key = (client.service_id().device, *size);
        match self.lock().get(&key) {
            Some(Status::Planned { plan, .. }) => return Some(plan.clone()),
            Some(Status::Refused(_) | Status::Wrong(_)) => return None,
            None => {}
        }
        match make() {
            Ok(plan) => {
                let status = Status::Planned { plan: plan.clone(), state: State::Unchecked(0) };
                self.lock().insert(key, status);
                Some(plan)
            }
            Err(reason) => {
                let size = size.describe();
                product_kernels::notice(format!(
                    "{} has no kernel for {size}; using CubeCL's: {reason}",
                    self.by
                ));
                self.lock().insert(key, Status::Refused(reason));
                None
            }
        }
    }

    /// Counts a use of a size with a plan. Checks it by `check` if that is due, or if the run asks
    /// for a check. Returns `None` if the plan is not to be used any more.
    pub(super) fn check_if_due(
        &self,
        client: &Client,
        size: &S,
        check: impl FnOnce() -> Finding,
    ) -> Option<()> {
        let is_requested = product_kernels::is_to_be_checked();
        if product_kernels::are_checks_disabled() {
            return Some(());
        }
        let state = self.count_use(client, size);
        if !is_requested && !state.is_some_and(State::is_due) {
            return Some(());
        }
        self.record(client, size, check())
    }

    /// Counts a use of a size, and returns the state of its checks.
    fn count_use(&self, client: &Client, size: &S) -> Option<State> {
        let mut statuses = self.lock();
        match statuses.get_mut(&(client.service_id().device, *size)) {
            Some(Status::Planned { state, .. }) => {
                if let State::Unchecked(n_uses) = state {
                    *n_uses += 1;
                }
                Some(*state)
            }
            _ => None,
        }
    }

    /// Records the result of a check; `None` if the plan is not to be used any more.
    fn record(&self, client: &Client, size: &S, finding: Finding) -> Option<()> {
        let mut statuses = self.lock();
        let status = statuses.get_mut(&(client.service_id().device, *size))?;
        let Status::Planned { state, .. } = status else { return None };
        match state.after_check(finding, self.by, &size.describe()) {
            Ok(next) => {
                *state = next;
                Some(())
            }
            Err(fault) => {
                *status = Status::Wrong(fault);
                None
            }
        }
    }

    /// Returns the reports of all sizes, sorted by their descriptions.
    pub(super) fn reports(&self, describe_plan: fn(&P) -> String) -> Vec<ProductReport> {
        let mut reports = Vec::new();
        for ((_, size), status) in self.lock().iter() {
            let (kernel, checked) = match status {
                Status::Planned { plan, state: State::Unchecked(_) } => {
                    (describe_plan(plan), Checked::NotYet)
                }
                Status::Planned { plan, state: State::Right { worst, .. } } => {
                    (describe_plan(plan), Checked::Right(*worst))
                }
                Status::Refused(reason) => ("cubecl".to_string(), Checked::Refused(reason.clone())),
                Status::Wrong(fault) => ("cubecl".to_string(), Checked::Wrong(fault.clone())),
            };
            reports.push(ProductReport { size: size.describe(), kernel, checked });
        }
        reports.sort_by(|a, b| a.size.cmp(&b.size));
        reports
    }
}
