//! Limited-memory BFGS (Nocedal 1980) for smooth functions with one minimum.
//!
//! ```text
//! p = -H ∇f, with H from the last m pairs s = Δx, y = Δ∇f;  x ← x + t p
//! t: f(x + t p) ≤ f(x) + c₁ t ∇f·p and ∇f(x + t p)·p ≥ c₂ ∇f·p, by doubling and halving (Lewis and Overton 2013)
//! ```

use std::collections::VecDeque;

/// Number of pairs kept, m; scipy's default.
const MEMORY: usize = 10;

/// Sufficient-decrease constant of the line search, c₁.
const SUFFICIENT_DECREASE: f64 = 1e-4;

/// Curvature constant of the line search, c₂.
const CURVATURE: f64 = 0.9;

/// Maximum number of points that a line search tries. In floating point, both conditions may fail
/// near the minimum.
const MAX_LINE_SEARCH_POINTS: usize = 40;

/// Stopping criteria. They are scikit-learn's.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Stops once no component of the gradient is larger in magnitude.
    pub gradient: f64,
    /// Stops once a step decreases the value by no more than this, relative to the largest of 1 and
    /// the values' magnitudes.
    pub descent: f64,
    /// Maximum number of steps.
    pub n_steps: usize,
}

/// Value of a function and its gradient.
pub(super) type Value = (f64, Vec<f64>);

/// A point, with the value of the function and its gradient there.
struct Point {
    x: Vec<f64>,
    value: f64,
    gradient: Vec<f64>,
}

impl Point {
    /// Computes value and gradient of `f` at `x`.
    fn at(x: Vec<f64>, f: &impl Fn(&[f64]) -> Value) -> Self {
        let (value, gradient) = f(&x);
        Self { x, value, gradient }
    }
}

/// Minimizes `f`, starting at `x`; returns the minimizer and the number of steps.
pub(super) fn minimize(x: Vec<f64>, limits: Limits, f: impl Fn(&[f64]) -> Value) -> (Vec<f64>, usize) {
    let mut point = Point::at(x, &f);
    let mut pairs: VecDeque<Pair> = VecDeque::new();
    for step in 0..limits.n_steps {
        if point.gradient.iter().all(|g| g.abs() <= limits.gradient) {
            return (point.x, step);
        }
        let mut direction = descent_direction(&point.gradient, &pairs);
        if dot(&direction, &point.gradient) >= 0.0 {
            // By rounding, the pairs no longer give a descent direction.
            pairs.clear();
            direction = descent_direction(&point.gradient, &pairs);
        }
        let first = if pairs.is_empty() {
            1.0 / dot(&point.gradient, &point.gradient).sqrt().max(1e-300)
        } else {
            1.0
        };
        let Some(next) = search(&point, &direction, first, &f) else { return (point.x, step) };
        let pair = Pair::new(&point, &next);
        if pair.curvature > 0.0 {
            pairs.truncate(MEMORY - 1);
            pairs.push_front(pair);
        }
        let decrease = (point.value - next.value) / point.value.abs().max(next.value.abs()).max(1.0);
        point = next;
        if decrease <= limits.descent {
            return (point.x, step + 1);
        }
    }
    (point.x, limits.n_steps)
}

/// A step s and the change y of the gradient.
struct Pair {
    s: Vec<f64>,
    y: Vec<f64>,
    /// Dot product s · y.
    curvature: f64,
}

impl Pair {
    /// Returns the pair of the step from `point` to `next`.
    fn new(point: &Point, next: &Point) -> Self {
        let s = difference(&next.x, &point.x);
        let y = difference(&next.gradient, &point.gradient);
        let curvature = dot(&s, &y);
        Self { s, y, curvature }
    }
}

/// Computes -H ∇f by the two-loop recursion; the newest pair comes first.
fn descent_direction(gradient: &[f64], pairs: &VecDeque<Pair>) -> Vec<f64> {
    let mut q: Vec<f64> = gradient.iter().map(|g| -g).collect();
    let mut alphas = Vec::with_capacity(pairs.len());
    for pair in pairs {
        let alpha = dot(&pair.s, &q) / pair.curvature;
        add_scaled(&mut q, -alpha, &pair.y);
        alphas.push(alpha);
    }
    if let Some(newest) = pairs.front() {
        let scale = newest.curvature / dot(&newest.y, &newest.y);
        q.iter_mut().for_each(|v| *v *= scale);
    }
    for (pair, alpha) in pairs.iter().zip(alphas).rev() {
        let beta = dot(&pair.y, &q) / pair.curvature;
        add_scaled(&mut q, alpha - beta, &pair.s);
    }
    q
}

/// Searches along the line from `start` until a point meets both conditions; returns the point of
/// the smallest value among those tried that meet the first.
fn search(start: &Point, direction: &[f64], first: f64, f: &impl Fn(&[f64]) -> Value) -> Option<Point> {
    let slope = dot(&start.gradient, direction);
    let mut low = 0.0;
    let mut high = f64::INFINITY;
    let mut t = first;
    let mut best: Option<Point> = None;
    for _ in 0..MAX_LINE_SEARCH_POINTS {
        let mut x = start.x.clone();
        add_scaled(&mut x, t, direction);
        let next = Point::at(x, f);
        let descends = next.value <= start.value + SUFFICIENT_DECREASE * t * slope;
        let flattens = dot(&next.gradient, direction) >= CURVATURE * slope;
        if descends && best.as_ref().is_none_or(|best| next.value < best.value) {
            best = Some(next);
        }
        if !descends {
            // NaN does not count as descent.
            high = t;
        } else if flattens {
            break;
        } else {
            low = t;
        }
        t = if high.is_finite() { 0.5 * (low + high) } else { 2.0 * low };
    }
    best
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn difference(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a - b).collect()
}

/// Adds `scale * values` to `sum`.
fn add_scaled(sum: &mut [f64], scale: f64, values: &[f64]) {
    sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += scale * value);
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { gradient: 1e-10, descent: 0.0, n_steps: 1000 };

    #[test]
    fn the_minimum_of_an_ill_conditioned_quadratic_is_found() {
        let scales: Vec<f64> = (0..30).map(|i| 10f64.powf(f64::from(i) / 10.0)).collect();
        let (x, n_steps) = minimize(vec![0.0; 30], LIMITS, |x: &[f64]| {
            let value = x.iter().zip(&scales).map(|(x, s)| 0.5 * s * (x - 3.0).powi(2)).sum();
            (value, x.iter().zip(&scales).map(|(x, s)| s * (x - 3.0)).collect())
        });
        assert!(n_steps < 400 && x.iter().all(|x| (x - 3.0).abs() < 1e-9), "{n_steps} steps: {x:?}");
    }

    /// Rosenbrock's function is not convex and has one minimum.
    #[test]
    fn the_minimum_of_rosenbrocks_function_is_found() {
        let (x, n_steps) = minimize(vec![-1.2, 1.0], LIMITS, |x: &[f64]| {
            let a = 1.0 - x[0];
            let b = x[1] - x[0] * x[0];
            (a * a + 100.0 * b * b, vec![-2.0 * a - 400.0 * x[0] * b, 200.0 * b])
        });
        assert!(n_steps < 100 && (x[0] - 1.0).abs() < 1e-8 && (x[1] - 1.0).abs() < 1e-8, "{n_steps}: {x:?}");
    }
}
