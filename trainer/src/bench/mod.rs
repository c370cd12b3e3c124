//! What `ocelli bench` measures.

pub mod backbone;
pub mod compare;
pub mod noise;
pub mod shard;
pub mod step;

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
