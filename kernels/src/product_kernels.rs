//! Kernels that multiply matrices or compute attention on a GPU, and results of checks of them.
//!
//! The order of preference is cuBLASLt, CubeCL's kernels, Burn's, and for attention Ocelli's own
//! kernels for NVIDIA GPUs, then products. An operation falls back to the next of these if the
//! library is missing, if there is no kernel for the size, or if a check of its results fails. Every
//! size is checked when it is first used (`ops::cube::check`), and single operations, which are
//! called products below, are checked again during a run, on the run's data.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU8, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// The kernels that a run asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Kernels {
    /// cuBLASLt if it can be used, else CubeCL's.
    #[default]
    Auto,
    /// cuBLASLt; the run does not start without it.
    Cublaslt,
    /// CubeCL's.
    Cubecl,
}

/// Error of a run that asks for kernels that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KernelsError {
    /// The device has no such kernels.
    #[error("cuBLASLt cannot be used: {reason}")]
    NoCublaslt {
        /// The reason, in one line.
        reason: String,
    },
}

/// A size of products or of attention, its kernel, and the results of its checks.
#[derive(Debug, Clone, PartialEq)]
pub struct ProductReport {
    /// Size, types and layout in words: `25216 x 384 x 1152 bf16`.
    pub size: String,
    /// The kernel that computes it: the library's algorithm, or why it is not used.
    pub kernel: String,
    /// Results of checks.
    pub checked: Checked,
}

/// Results of checks of a product.
#[derive(Debug, Clone, PartialEq)]
pub enum Checked {
    /// The results were right; the largest error as a share of the rounding error allowed.
    Right(f32),
    /// All results have been zero so far.
    NotYet,
    /// The results were wrong; the product is computed by the next kernels in order of preference.
    Wrong(String),
    /// The library refused it.
    Refused(String),
}

impl fmt::Display for Checked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Right(worst) => write!(f, "right, {:.0} % of what rounding explains", 100.0 * worst),
            Self::NotYet => f.write_str("not checked: its results were zero"),
            Self::Wrong(what) => write!(f, "WRONG: {what}"),
            Self::Refused(reason) => write!(f, "refused: {reason}"),
        }
    }
}

/// Result of one check of a product.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(not(feature = "cube"), allow(dead_code))]
pub(crate) enum Finding {
    /// The product is right; the largest error as a share of what is allowed.
    Right(f32),
    /// The check is inconclusive: all results are zero or not finite, or the device has no memory
    /// for the check.
    Inconclusive,
    /// Description of the fault.
    Wrong(String),
}

/// State of the checks of a size that the library computes.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) enum State {
    /// All checks were inconclusive so far; the number of uses.
    Unchecked(u64),
    /// The last check was right; the largest error, and the number of the run's check at that time.
    Right { worst: f32, check: u64 },
}

/// Number of uses of a size that are all checked while the checks are inconclusive, for example
/// because results are zero. From then on, those whose number is a power of two are checked, so
/// that a head whose gradient is always zero does not make every step wait.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
const FIRST_USES: u64 = 4;

#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
impl State {
    /// Returns whether a use of the size is checked, regardless of the checks that the run asks
    /// for.
    pub(crate) fn is_due(self) -> bool {
        match self {
            Self::Unchecked(n_uses) => n_uses <= FIRST_USES || n_uses.is_power_of_two(),
            Self::Right { .. } => false,
        }
    }

    /// Returns the state after a check of the size, which is called `size` in messages, and its
    /// kernels `by`.
    ///
    /// # Errors
    /// Description of the fault, if the size is to be computed by the next kernels in order of
    /// preference. If results of it have been used that may have been wrong, the fault is recorded
    /// for [`wrong`] as well; otherwise a notice is added.
    pub(crate) fn after_check(self, finding: Finding, by: &str, size: &str) -> Result<Self, String> {
        let fault = match finding {
            Finding::Right(worst) => return Ok(Self::Right { worst, check: check_number() }),
            Finding::Inconclusive => return Ok(self),
            Finding::Wrong(fault) => fault,
        };
        match self {
            Self::Right { check, .. } => {
                record_wrong(
                    format!("{by} computed {size} correctly before, but no longer does: {fault}"),
                    check,
                );
            }
            // Results whose checks were inconclusive have been used.
            Self::Unchecked(n_uses) if n_uses > FIRST_USES => {
                record_wrong(
                    format!("{by} computes {size} incorrectly, which was not checked before: {fault}"),
                    0,
                );
            }
            Self::Unchecked(_) => {
                notice(format!("{by} computes {size} incorrectly; using CubeCL's kernel: {fault}"));
            }
        }
        Err(fault)
    }
}

/// A product whose results were right at first and are wrong now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrongProduct {
    /// Description of the fault.
    pub what: String,
    /// Number of the last check, as given to [`check_one`], in which it was right; 0 if that was
    /// before the first of them, or never.
    pub last_right: u64,
}

static ARE_CHECKS_DISABLED: AtomicBool = AtomicBool::new(false);
static KERNELS: AtomicU8 = AtomicU8::new(Kernels::Auto as u8);
static NOTICES: Mutex<Vec<String>> = Mutex::new(Vec::new());
static WRONG: Mutex<Option<WrongProduct>> = Mutex::new(None);
/// Number of the last check that [`check_one`] asked for.
static CHECK: AtomicU64 = AtomicU64::new(0);
/// Number of products of the current step, and of the one before.
static N_PRODUCTS: AtomicU64 = AtomicU64::new(0);
static N_PRODUCTS_BEFORE: AtomicU64 = AtomicU64::new(0);
/// Number of products before the one that is checked on the run's data; negative for none.
static UNTIL_CHECK: AtomicI64 = AtomicI64::new(-1);

/// Sets the kernels of this process.
pub(crate) fn set(kernels: Kernels) {
    KERNELS.store(kernels as u8, Ordering::Relaxed);
}

/// Returns whether the run's choice allows the library.
#[cfg(feature = "cuda")]
pub(crate) fn library_is_chosen() -> bool {
    KERNELS.load(Ordering::Relaxed) != Kernels::Cubecl as u8
}

/// Takes the notices for the user that have been added since the last call.
pub fn notices() -> Vec<String> {
    std::mem::take(&mut NOTICES.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Adds a notice.
pub(crate) fn notice(text: String) {
    NOTICES.lock().unwrap_or_else(PoisonError::into_inner).push(text);
}

/// Begins a step, whose products are counted from zero.
pub fn begin_step() {
    N_PRODUCTS_BEFORE.store(N_PRODUCTS.swap(0, Ordering::Relaxed), Ordering::Relaxed);
}

/// Requests a check of one product of the step that begins, on the run's data. `number` is the
/// number of this check, from 1 on; it and the number of products of the step before decide which
/// product is checked.
pub fn check_one(number: u64) {
    let n_products = N_PRODUCTS_BEFORE.load(Ordering::Relaxed).max(1);
    CHECK.store(number, Ordering::Relaxed);
    UNTIL_CHECK.store(checked_product(number, n_products) as i64, Ordering::Relaxed);
}

/// Returns the index of the product that check `number` checks, below `n_products`. Multiples of
/// the golden ratio spread successive checks evenly over a step.
fn checked_product(number: u64, n_products: u64) -> u64 {
    let fraction = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((u128::from(fraction) * u128::from(n_products)) >> 64) as u64
}

/// Disables all checks of products, for devices that compute nothing, such as the stub driver of
/// the tests.
pub fn disable_checks() {
    ARE_CHECKS_DISABLED.store(true, Ordering::Relaxed);
}

/// Returns whether checks are disabled.
pub fn are_checks_disabled() -> bool {
    ARE_CHECKS_DISABLED.load(Ordering::Relaxed)
}

/// Counts a product, and returns whether it is to be checked.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) fn is_to_be_checked() -> bool {
    N_PRODUCTS.fetch_add(1, Ordering::Relaxed);
    UNTIL_CHECK.load(Ordering::Relaxed) >= 0 && UNTIL_CHECK.fetch_sub(1, Ordering::Relaxed) == 0
}

/// Returns the first product whose results were right before and are wrong now, if there is one.
/// Everything computed since the check in which it was last right may be wrong as well.
pub fn wrong() -> Option<WrongProduct> {
    WRONG.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Records that the results of a product have become wrong.
pub(crate) fn record_wrong(what: String, last_right: u64) {
    let mut wrong = WRONG.lock().unwrap_or_else(PoisonError::into_inner);
    wrong.get_or_insert(WrongProduct { what, last_right });
}

/// Records a wrong product that does not exist, for tests of fault handling.
pub fn inject_wrong_product() {
    record_wrong("a product was wrong because of an injected fault".into(), 0);
}

/// Returns the number of the last check that was asked for; 0 if there was none.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) fn check_number() -> u64 {
    CHECK.load(Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Products of the forward and backward passes, of teacher and student, are all checked.
    #[test]
    fn successive_checks_reach_every_product_of_a_step() {
        for n_products in [1, 7, 539, 4000] {
            let mut checked = vec![false; n_products as usize];
            for number in 1..=3 * n_products {
                checked[checked_product(number, n_products) as usize] = true;
            }
            let n_unchecked = checked.iter().filter(|is_checked| !**is_checked).count();
            assert_eq!(n_unchecked, 0, "of {n_products}");
        }
    }

    /// A size that becomes wrong is recorded with its last right check, which ends the run. One
    /// that is wrong in its first check is computed by other kernels, with a notice.
    #[test]
    fn wrong_products_are_recorded_or_noticed() {
        let wrong_row = Finding::Wrong("row 3 is wrong".into());
        let first = State::Unchecked(1);
        assert!(first.is_due() && !State::Unchecked(7).is_due() && State::Unchecked(8).is_due());
        assert_eq!(first.after_check(Finding::Inconclusive, "cuBLASLt", "[2, 2] · [2, 2]"), Ok(first));
        assert!(first.after_check(wrong_row.clone(), "cuBLASLt", "[2, 2] · [2, 2]").is_err());
        let notices = notices();
        assert!(notices.iter().any(|notice| notice.contains("[2, 2] · [2, 2] incorrectly")), "{notices:?}");
        assert_eq!(wrong(), None, "no result of it was used");

        let state = first.after_check(Finding::Right(0.2), "cuBLASLt", "[4, 4] · [4, 4]").expect("right");
        let State::Right { check, .. } = state else { panic!("{state:?}") };
        assert!(!state.is_due());
        // An inconclusive check, for want of memory, does not change the state.
        assert_eq!(state.after_check(Finding::Inconclusive, "cuBLASLt", "[4, 4] · [4, 4]"), Ok(state));
        assert!(state.after_check(wrong_row, "cuBLASLt", "[4, 4] · [4, 4]").is_err());
        let product = wrong().expect("a wrong product");
        assert_eq!(product.last_right, check);
        assert!(product.what.contains("but no longer does: row 3"), "{}", product.what);
    }

    #[test]
    fn exactly_one_product_of_a_step_is_checked() {
        for _ in 0..2 {
            begin_step();
            for _ in 0..50 {
                is_to_be_checked();
            }
        }
        begin_step();
        check_one(3);
        let checked: Vec<usize> = (0..50).filter(|_| is_to_be_checked()).collect();
        assert_eq!(checked, [checked_product(3, 50) as usize]);
    }
}
