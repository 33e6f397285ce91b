//! The distributions that a simulated world draws from.

use std::f64::consts::TAU;

use rand::RngExt;

/// A draw from the standard normal distribution (Box and Muller, 1958).
pub fn normal(random: &mut impl RngExt) -> f64 {
    (-2.0 * positive_unit(random).ln()).sqrt() * (TAU * random.random::<f64>()).cos()
}

/// A draw from the exponential distribution with this mean.
pub fn exponential(random: &mut impl RngExt, mean: f64) -> f64 {
    -mean * positive_unit(random).ln()
}

/// Above 0, up to 1: the logarithm of 0 would be infinite.
fn positive_unit(random: &mut impl RngExt) -> f64 {
    1.0 - random.random::<f64>()
}
