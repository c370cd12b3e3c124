//! Exit codes: 0 done · 1 a check has failed · 2 configuration · 3 data · 74 standard output cannot
//! be written · 78 not finite · 134 lost peer or deadline · 143 preempted, checkpoint written.

use std::process::ExitCode;

use curate::CurateError;
use eval::EvalError;
use networks::NetworkError;
use pipeline::PipelineError;
use prep::PrepError;
use ranks::EngineError;
use report::ReportError;
use session::SessionError;
use trainer::TrainError;
use weights::WeightsError;

/// A check has failed.
pub(crate) const CHECK_FAILED: u8 = 1;
/// The recipe, the flags or the work directory are invalid.
pub(crate) const CONFIGURATION: u8 = 2;
/// The shards, the disk or a checkpoint have a defect.
const DATA: u8 = 3;
/// Standard output is a closed pipe or a full disk.
pub(crate) const OUTPUT_LOST: u8 = 74;
/// Loss or gradients were not finite too often.
const NOT_FINITE: u8 = 78;
/// Another rank has ended or does not respond.
const LOST_PEER: u8 = 134;
/// A signal asked the run to stop; a checkpoint is written.
pub(crate) const PREEMPTED: u8 = 143;

/// Returns the exit code for `error`.
pub(crate) fn code_of(error: &anyhow::Error) -> ExitCode {
    let code = error.chain().find_map(|cause| {
        if let Some(error) = cause.downcast_ref::<SessionError>() {
            return Some(of_session(error));
        }
        if let Some(error) = cause.downcast_ref::<PrepError>() {
            return Some(of_prep(error));
        }
        if let Some(error) = cause.downcast_ref::<TrainError>() {
            return Some(of_train(error));
        }
        if let Some(error) = cause.downcast_ref::<PipelineError>() {
            return Some(of_pipeline(error));
        }
        if let Some(error) = cause.downcast_ref::<EngineError>() {
            return Some(of_engine(error));
        }
        if let Some(error) = cause.downcast_ref::<WeightsError>() {
            return Some(of_weights(error));
        }
        if cause.is::<std::io::Error>() || cause.is::<csv::Error>() {
            return Some(DATA);
        }
        if let Some(error) = cause.downcast_ref::<ReportError>() {
            return Some(match error {
                ReportError::Run(error) => of_train(error),
                ReportError::Eval(error) => of_eval(error),
                ReportError::Read { .. } | ReportError::Picture { .. } | ReportError::Encode(_) => DATA,
            });
        }
        if let Some(error) = cause.downcast_ref::<CurateError>() {
            return Some(of_curate(error));
        }
        cause.downcast_ref::<EvalError>().map(of_eval)
    });
    // Errors without a type of their own come from the flags.
    ExitCode::from(code.unwrap_or(CONFIGURATION))
}

fn of_session(error: &SessionError) -> u8 {
    match error {
        SessionError::Ranks(error) => of_engine(error),
        SessionError::Prep(error) => of_prep(error),
        SessionError::Data(error) => of_pipeline(error),
        SessionError::Weights(error) => of_weights(error),
        SessionError::Train(error) => of_train(error),
        SessionError::InitialHeads { source } => of_session(source),
        SessionError::Io { .. } | SessionError::CheckpointRemoved { .. } | SessionError::ForkCopy { .. } => {
            DATA
        }
        SessionError::NoShards
        | SessionError::NoHeads { .. }
        | SessionError::NoBackbone
        | SessionError::NoInitialWeights { .. }
        | SessionError::BeganWithWeights { .. }
        | SessionError::BeganWithHeads { .. }
        | SessionError::DoesNotFit { .. }
        | SessionError::OtherWeights { .. }
        | SessionError::ForkNotStarted { .. }
        | SessionError::ForkOccupied { .. }
        | SessionError::ForkChannels { .. }
        | SessionError::ForkPositions { .. }
        | SessionError::FrozenUnnamed { .. }
        | SessionError::Frozen { .. }
        | SessionError::FrozenDepth { .. }
        | SessionError::FrozenChanged { .. }
        | SessionError::Sources { .. }
        | SessionError::ImageWeight { .. }
        | SessionError::NoImageWeights { .. }
        | SessionError::DeviceType { .. }
        | SessionError::Groups { .. }
        | SessionError::Kernels { .. }
        | SessionError::Launch(_)
        | SessionError::Device(_) => CONFIGURATION,
    }
}

fn of_prep(error: &PrepError) -> u8 {
    match error {
        PrepError::Data(error) => of_pipeline(error),
        PrepError::Io { .. } | PrepError::Walk { .. } | PrepError::Table { .. } => DATA,
        PrepError::Line { .. }
        | PrepError::Missing { .. }
        | PrepError::NotImages { .. }
        | PrepError::NotRegular { .. }
        | PrepError::NoColumn { .. }
        | PrepError::NoImageColumn { .. }
        | PrepError::EmptyColumn { .. }
        | PrepError::SeveralValues { .. } => CONFIGURATION,
    }
}

fn of_eval(error: &EvalError) -> u8 {
    match error {
        EvalError::Data(error) => of_pipeline(error),
        EvalError::ImageSize { .. }
        | EvalError::ImagesRequired { .. }
        | EvalError::TooFewImages { .. }
        | EvalError::SeveralClasses { .. }
        | EvalError::MixedInputs { .. } => CONFIGURATION,
        EvalError::NotFinite { .. } => NOT_FINITE,
        EvalError::Network(NetworkError::Weights { .. })
        | EvalError::NoLabels { .. }
        | EvalError::ClassNames { .. }
        | EvalError::NoImages { .. }
        | EvalError::NoMasks { .. }
        | EvalError::Mask { .. }
        | EvalError::OneClass { .. }
        | EvalError::Io { .. }
        | EvalError::Read { .. }
        | EvalError::Write { .. } => DATA,
    }
}

fn of_curate(error: &CurateError) -> u8 {
    match error {
        CurateError::Ranks(error) => of_engine(error),
        CurateError::TooManyClusters { .. }
        | CurateError::NoClusters
        | CurateError::Levels { .. }
        | CurateError::Widths { .. } => CONFIGURATION,
        CurateError::Shape { .. } | CurateError::NotFinite { .. } => DATA,
    }
}

fn of_train(error: &TrainError) -> u8 {
    match error {
        TrainError::Recipe { .. }
        | TrainError::RecipeMismatch { .. }
        | TrainError::DataMismatch { .. }
        | TrainError::ViewsMismatch { .. }
        | TrainError::RanksDiffer { .. }
        | TrainError::Busy { .. }
        | TrainError::NoRun { .. }
        | TrainError::Augment(_) => CONFIGURATION,
        TrainError::Ranks(error) => of_engine(error),
        TrainError::NotFinite { .. } => NOT_FINITE,
        TrainError::WrongProduct { .. } => CHECK_FAILED,
        TrainError::Data(error) => of_pipeline(error),
        TrainError::Io { .. }
        | TrainError::CheckpointWrite { .. }
        | TrainError::CheckpointRead { .. }
        | TrainError::Probe { .. }
        | TrainError::PeersFailed { .. }
        | TrainError::NoUnit { .. }
        | TrainError::WorkdirMissing { .. }
        | TrainError::Network(NetworkError::Weights { .. })
        | TrainError::DataEnded => DATA,
    }
}

fn of_weights(error: &WeightsError) -> u8 {
    match error {
        WeightsError::Unsupported { .. } | WeightsError::Exists { .. } => CONFIGURATION,
        WeightsError::Io { .. }
        | WeightsError::Malformed { .. }
        | WeightsError::Unknown { .. }
        | WeightsError::Network(NetworkError::Weights { .. }) => DATA,
    }
}

fn of_engine(error: &EngineError) -> u8 {
    match error {
        EngineError::Unavailable { .. } => CONFIGURATION,
        EngineError::PeerFailed { .. } => DATA,
        EngineError::PeerLost { .. }
        | EngineError::Deadline { .. }
        | EngineError::Failed { .. }
        | EngineError::Device(_)
        | EngineError::Lengths { .. }
        | EngineError::Ended => LOST_PEER,
    }
}

fn of_pipeline(error: &PipelineError) -> u8 {
    match error {
        PipelineError::InvalidShardList { .. }
        | PipelineError::UnevenShare { .. }
        | PipelineError::Sampling { .. } => CONFIGURATION,
        _ => DATA,
    }
}
