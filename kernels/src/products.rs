//! Kernels that multiply matrices on a GPU, and findings about their results.
//!
//! The ladder is cuBLASLt, CubeCL's kernels, Burn's. A product takes one step down where the
//! library is missing, where it has no algorithm for a size, or where a check of its results fails.
//! Every size is checked when it is first used (`ops::cube::check`), and single products of a run
//! are checked again later, on its own data.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU8, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// The kernels that a run asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Kernels {
    /// cuBLASLt where it can be used, else CubeCL's.
    #[default]
    Auto,
    /// cuBLASLt, without which the run does not start.
    Cublaslt,
    /// CubeCL's.
    Cubecl,
}

/// The kernels that a run asks for cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KernelsError {
    /// The device has no such kernels.
    #[error("cuBLASLt cannot be used: {reason}")]
    NoCublaslt {
        /// The reason, in one line.
        reason: String,
    },
}

/// A size of products, and what has been found out about it.
#[derive(Debug, Clone, PartialEq)]
pub struct ProductReport {
    /// Size, types and layout in words: `25216 x 384 x 1152 bf16`.
    pub size: String,
    /// The kernel that computes it: the library's algorithm, or why it is not used.
    pub kernel: String,
    /// Findings of checks.
    pub checked: Checked,
}

/// Findings of checks of a product.
#[derive(Debug, Clone, PartialEq)]
pub enum Checked {
    /// It was right; the largest error as a share of what rounding explains.
    Right(f32),
    /// All results have been zero so far.
    NotYet,
    /// It was wrong, and is computed by the next kernels of the ladder.
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

/// Finding of a check of a product.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(not(feature = "cube"), allow(dead_code))]
pub(crate) enum Finding {
    /// The product is right; the largest error as a share of what is allowed.
    Right(f32),
    /// All results are zero or not finite, from which nothing can be told; or the device has no
    /// memory for the check.
    Nothing,
    /// A fault, in words.
    Wrong(String),
}

/// Knowledge of a size that the library computes.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) enum State {
    /// Nothing could be told from the results of so many uses.
    Unchecked(u64),
    /// The largest error, and the number of the run's check in which it was right last.
    Right { worst: f32, check: u64 },
}

/// Uses of a size that are all checked while nothing can be told from its results, which may be
/// zero; from then on those whose number is a power of two, so that a head whose gradient
/// is zero does not make each of its steps wait.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
const FIRST_USES: u64 = 4;

#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
impl State {
    /// Returns whether a use of the size is checked, whatever the run asks for.
    pub(crate) fn is_due(self) -> bool {
        match self {
            Self::Unchecked(n_uses) => n_uses <= FIRST_USES || n_uses.is_power_of_two(),
            Self::Right { .. } => false,
        }
    }

    /// Returns what is known of the size, called `size` in messages, after a check.
    ///
    /// # Errors
    /// The fault, in words, of a size that is left to the next kernels of the ladder. If results of
    /// it were used that may have been wrong, [`wrong`] has it as well; else a notice tells it.
    pub(crate) fn after(self, finding: Finding, size: &str) -> Result<Self, String> {
        let fault = match finding {
            Finding::Right(worst) => return Ok(Self::Right { worst, check: check_number() }),
            Finding::Nothing => return Ok(self),
            Finding::Wrong(fault) => fault,
        };
        match self {
            Self::Right { check, .. } => {
                note_wrong(format!("{size} by cuBLASLt was right and is not any more: {fault}"), check);
            }
            // Results that nothing could be told from have been used.
            Self::Unchecked(n_uses) if n_uses > FIRST_USES => {
                note_wrong(format!("{size} by cuBLASLt is wrong, and was not checked before: {fault}"), 0);
            }
            Self::Unchecked(_) => {
                notice(format!("cuBLASLt computes {size} wrongly, so that CubeCL does: {fault}"));
            }
        }
        Err(fault)
    }
}

/// A product that had been right, and is not any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrongProduct {
    /// The fault, in words.
    pub what: String,
    /// Number of the check, as given to [`check_one`], in which it was right last; 0 if that was
    /// before the first of them, or never.
    pub last_right: u64,
}

static IS_TRUSTED: AtomicBool = AtomicBool::new(false);
static KERNELS: AtomicU8 = AtomicU8::new(Kernels::Auto as u8);
static NOTICES: Mutex<Vec<String>> = Mutex::new(Vec::new());
static WRONG: Mutex<Option<WrongProduct>> = Mutex::new(None);
/// Number of the check that [`check_one`] asked for last.
static CHECK: AtomicU64 = AtomicU64::new(0);
/// Products of the step that is computed now, and of the one before.
static N_PRODUCTS: AtomicU64 = AtomicU64::new(0);
static N_PRODUCTS_BEFORE: AtomicU64 = AtomicU64::new(0);
/// Products until the one that is checked on a run's data; negative for none.
static UNTIL_CHECK: AtomicI64 = AtomicI64::new(-1);

/// Sets the kernels of this process.
pub(crate) fn set(kernels: Kernels) {
    KERNELS.store(kernels as u8, Ordering::Relaxed);
}

/// Returns whether the library may be used, as far as the run's choice goes.
#[cfg(feature = "cuda")]
pub(crate) fn library_is_chosen() -> bool {
    KERNELS.load(Ordering::Relaxed) != Kernels::Cubecl as u8
}

/// Takes what there is to tell a user: each once.
pub fn notices() -> Vec<String> {
    std::mem::take(&mut NOTICES.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Adds a notice.
pub(crate) fn notice(text: String) {
    NOTICES.lock().unwrap_or_else(PoisonError::into_inner).push(text);
}

/// Begins a step: products are counted from here on.
pub fn begin_step() {
    N_PRODUCTS_BEFORE.store(N_PRODUCTS.swap(0, Ordering::Relaxed), Ordering::Relaxed);
}

/// Has one of the products of the step that begins checked on the data of the run: which of those
/// that the step before had follows from `number`, the number of this check, from 1 on.
pub fn check_one(number: u64) {
    let n_products = N_PRODUCTS_BEFORE.load(Ordering::Relaxed).max(1);
    CHECK.store(number, Ordering::Relaxed);
    UNTIL_CHECK.store(place_of_check(number, n_products) as i64, Ordering::Relaxed);
}

/// Returns the number of the product that check `number` is of, below `n_products`: those of
/// successive checks are spread over a step, as multiples of the golden ratio are.
fn place_of_check(number: u64, n_products: u64) -> u64 {
    let share = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((u128::from(share) * u128::from(n_products)) >> 64) as u64
}

/// Leaves out all checks of products, for a device that computes nothing, as the stub driver of the
/// tests.
pub fn trust() {
    IS_TRUSTED.store(true, Ordering::Relaxed);
}

/// Returns whether checks are left out.
pub fn is_trusted() -> bool {
    IS_TRUSTED.load(Ordering::Relaxed)
}

/// Returns whether the product that is computed now is to be checked.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) fn is_to_be_checked() -> bool {
    N_PRODUCTS.fetch_add(1, Ordering::Relaxed);
    UNTIL_CHECK.load(Ordering::Relaxed) >= 0 && UNTIL_CHECK.fetch_sub(1, Ordering::Relaxed) == 0
}

/// Returns what is wrong with a product that had been right before, if one has been found: what was
/// computed since the check before may be wrong as well.
pub fn wrong() -> Option<WrongProduct> {
    WRONG.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Notes that a product has become wrong.
pub(crate) fn note_wrong(what: String, last_right: u64) {
    let mut wrong = WRONG.lock().unwrap_or_else(PoisonError::into_inner);
    wrong.get_or_insert(WrongProduct { what, last_right });
}

/// Notes a product as wrong that is not, for drills.
pub fn plant_wrong() {
    note_wrong("a product was wrong by a planted fault".into(), 0);
}

/// Returns the number of the check that was asked for last; 0 if none was.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) fn check_number() -> u64 {
    CHECK.load(Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Forwards and backwards, the teacher's products and the student's: all are checked in time.
    #[test]
    fn checks_come_to_every_product_of_a_step() {
        for n_products in [1, 7, 539, 4000] {
            let mut checked = vec![false; n_products as usize];
            for number in 1..=3 * n_products {
                checked[place_of_check(number, n_products) as usize] = true;
            }
            let n_left = checked.iter().filter(|is_checked| !**is_checked).count();
            assert_eq!(n_left, 0, "of {n_products}");
        }
    }

    /// A size that was right and is not ends the run, which learns when it was right last; one that
    /// is wrong from the start is left to others, and that is told.
    #[test]
    fn findings_have_consequences() {
        let wrong_product = || Finding::Wrong("row 3 is wrong".into());
        let first = State::Unchecked(1);
        assert!(first.is_due() && !State::Unchecked(7).is_due() && State::Unchecked(8).is_due());
        assert_eq!(first.after(Finding::Nothing, "[2, 2] · [2, 2]"), Ok(first));
        assert!(first.after(wrong_product(), "[2, 2] · [2, 2]").is_err());
        let told = notices();
        assert!(told.iter().any(|notice| notice.contains("[2, 2] · [2, 2] wrongly")), "{told:?}");
        assert_eq!(wrong(), None, "no result of it was used");

        let state = first.after(Finding::Right(0.2), "[4, 4] · [4, 4]").expect("right");
        let State::Right { check, .. } = state else { panic!("{state:?}") };
        assert!(!state.is_due());
        // Without memory for a check, what was right stays so.
        assert_eq!(state.after(Finding::Nothing, "[4, 4] · [4, 4]"), Ok(state));
        assert!(state.after(wrong_product(), "[4, 4] · [4, 4]").is_err());
        let found = wrong().expect("a wrong product");
        assert_eq!(found.last_right, check);
        assert!(found.what.contains("was right and is not any more: row 3"), "{}", found.what);
    }

    /// One product of a step is chosen, the one whose turn it is.
    #[test]
    fn one_product_of_the_step_is_chosen() {
        for _ in 0..2 {
            begin_step();
            for _ in 0..50 {
                is_to_be_checked();
            }
        }
        begin_step();
        check_one(3);
        let chosen: Vec<usize> = (0..50).filter(|_| is_to_be_checked()).collect();
        assert_eq!(chosen, [place_of_check(3, 50) as usize]);
    }
}
