//! The loop of a training run, whatever is trained: it decides when to stop, when to save, and what is saved if a step fails.

/// A training run as one rank takes part in it. All ranks run the loop over the same steps, and their answers are the same.
pub trait TrainingRun {
    /// The error of a failed call.
    type Error;

    /// Whether to stop before the next step, on which all ranks agree. What has been saved by now may be committed.
    ///
    /// # Errors
    /// Failures of other ranks.
    fn agreed_to_stop(&mut self) -> Result<bool, Self::Error>;

    /// Takes the step with this index, counted from 0.
    ///
    /// # Errors
    /// What leaves nothing to save, such as failures of other ranks.
    fn step(&mut self, index: u64) -> Result<StepOutcome<Self::Error>, Self::Error>;

    /// What follows after `steps` steps, such as an evaluation.
    ///
    /// # Errors
    /// The evaluation, or whatever else follows, has failed.
    fn stepped(&mut self, _steps: u64) -> Result<(), Self::Error> {
        Ok(())
    }

    /// Saves the state after `steps` steps, or begins to.
    ///
    /// # Errors
    /// A disk that refuses, failures of other ranks.
    fn save(&mut self, steps: u64) -> Result<(), Self::Error>;

    /// Waits until all that [`save`](Self::save) has begun is on the disk.
    ///
    /// # Errors
    /// As for [`save`](Self::save).
    fn finish_saving(&mut self) -> Result<(), Self::Error> {
        Ok(())
    }
}

/// How a step ended.
#[derive(Debug)]
pub enum StepOutcome<E> {
    /// The run goes on.
    Done,
    /// The step has changed nothing, and the run ends with this error. The state before the step is saved.
    FailedBefore(E),
    /// The step is done, and the run ends with this error. The state after the step is saved.
    FailedAfter(E),
}

/// The steps of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Steps {
    /// The first one: the number of steps that earlier runs have taken and saved.
    pub first: u64,
    /// The number of steps after which the training is complete, those of earlier runs included.
    pub total: u64,
    /// The state is saved after each multiple of this number, and at the end.
    pub save_every: Option<u64>,
}

/// The state in which the loop ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoopEnd {
    /// Number of steps taken, with those of earlier runs.
    pub steps: u64,
    /// Whether the run stopped before its last step because it was asked to.
    pub interrupted: bool,
}

/// Takes the steps of a run and saves its state where it is due, before the run ends, and before it ends with an error of a step.
///
/// # Errors
/// A call of the run has failed, or a step has ended with an error.
pub fn run_steps<R: TrainingRun>(run: &mut R, steps: Steps) -> Result<LoopEnd, R::Error> {
    let (mut step, mut saved, mut interrupted) = (steps.first, steps.first, false);
    while step < steps.total {
        if run.agreed_to_stop()? {
            interrupted = true;
            break;
        }
        let failure = match run.step(step)? {
            StepOutcome::FailedBefore(error) => Some(error),
            StepOutcome::FailedAfter(error) => {
                step += 1;
                Some(error)
            }
            StepOutcome::Done => {
                step += 1;
                None
            }
        };
        if let Some(error) = failure {
            if saved < step {
                run.save(step)?;
            }
            run.finish_saving()?;
            return Err(error);
        }
        run.stepped(step)?;
        if steps.save_every.is_some_and(|every| step.is_multiple_of(every)) {
            run.save(step)?;
            saved = step;
        }
    }
    if saved < step {
        run.save(step)?;
    }
    run.finish_saving()?;
    Ok(LoopEnd { steps: step, interrupted })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A run that notes what the loop does, and whose steps end as `ends` says.
    struct Noted {
        log: Vec<String>,
        stop_before: u64,
        ends: fn(u64) -> StepOutcome<&'static str>,
    }

    impl TrainingRun for Noted {
        type Error = &'static str;

        fn agreed_to_stop(&mut self) -> Result<bool, Self::Error> {
            let taken = self.log.iter().filter(|line| line.starts_with("step")).count() as u64;
            Ok(taken == self.stop_before)
        }

        fn step(&mut self, index: u64) -> Result<StepOutcome<Self::Error>, Self::Error> {
            self.log.push(format!("step {index}"));
            Ok((self.ends)(index))
        }

        fn stepped(&mut self, steps: u64) -> Result<(), Self::Error> {
            self.log.push(format!("after {steps}"));
            Ok(())
        }

        fn save(&mut self, steps: u64) -> Result<(), Self::Error> {
            self.log.push(format!("save {steps}"));
            Ok(())
        }

        fn finish_saving(&mut self) -> Result<(), Self::Error> {
            self.log.push("finish".into());
            Ok(())
        }
    }

    fn run(
        ends: fn(u64) -> StepOutcome<&'static str>,
        stop_before: u64,
        steps: Steps,
    ) -> (Result<LoopEnd, &'static str>, String) {
        let mut noted = Noted { log: Vec::new(), stop_before, ends };
        let end = run_steps(&mut noted, steps);
        (end, noted.log.join(", "))
    }

    #[test]
    fn the_state_is_saved_where_it_is_due_and_once_at_the_end() {
        let steps = |first, total, every| Steps { first, total, save_every: every };
        let done = |_| StepOutcome::Done;
        let (end, log) = run(done, 9, steps(1, 4, Some(2)));
        assert_eq!(end, Ok(LoopEnd { steps: 4, interrupted: false }));
        assert_eq!(log, "step 1, after 2, save 2, step 2, after 3, step 3, after 4, save 4, finish");
        let (_, log) = run(done, 9, steps(0, 3, Some(2)));
        assert_eq!(log, "step 0, after 1, step 1, after 2, save 2, step 2, after 3, save 3, finish");
        let (end, log) = run(done, 2, steps(5, 9, None));
        assert_eq!(end, Ok(LoopEnd { steps: 7, interrupted: true }));
        assert_eq!(log, "step 5, after 6, step 6, after 7, save 7, finish");
        // Nothing is saved that was saved before the run.
        assert_eq!(run(done, 0, steps(5, 9, None)).1, "finish");
        assert_eq!(run(done, 9, steps(4, 4, Some(1))).1, "finish");
    }

    #[test]
    fn an_error_of_a_step_ends_the_run_after_the_last_good_state_is_saved() {
        let steps = Steps { first: 0, total: 9, save_every: Some(2) };
        let diverged = |index| if index == 1 { StepOutcome::FailedBefore("diverged") } else { StepOutcome::Done };
        let (end, log) = run(diverged, 9, steps);
        assert_eq!((end, &*log), (Err("diverged"), "step 0, after 1, step 1, save 1, finish"));
        let diverged = |index| if index == 2 { StepOutcome::FailedBefore("diverged") } else { StepOutcome::Done };
        let (end, log) = run(diverged, 9, steps);
        assert_eq!((end, &*log), (Err("diverged"), "step 0, after 1, step 1, after 2, save 2, step 2, finish"));
        let spike = |index| if index == 0 { StepOutcome::FailedAfter("spike") } else { StepOutcome::Done };
        let (end, log) = run(spike, 9, steps);
        assert_eq!((end, &*log), (Err("spike"), "step 0, save 1, finish"));
    }
}
