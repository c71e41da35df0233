// SPDX-License-Identifier: Apache-2.0

package install

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/conflist"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Uninstall is what is to be taken from a node.
type Uninstall struct {
	Places
	// Backups is the directory for conflists as they were; "" keeps none.
	Backups string
	// Root is "/", below which the runtimes keep what they have attached.
	Root string
	// NoWait removes the plugin although attachments may call it.
	NoWait bool
	// Settle is how long ADDs take that have begun with a conflist that named us.
	Settle time.Duration
	// State removes rules and state, and is called once the plugin is gone; nil
	// leaves them. It has to be fine with being called once more.
	State func(context.Context) error
}

// Uninstalled is what one Step removed.
type Uninstalled struct {
	Conflists []conflist.Change
	// NoBackup is why what conflists were could not be kept; nil where it could.
	NoBackup error
	Binaries []string // their paths; none where there was none, or they stay
	// Attached is why the plugin stays, or would have without NoWait.
	Attached []Attachment
}

// AttachedError says that the plugin stays, since runtimes will call it.
type AttachedError struct{ Attached []Attachment }

// Error names some of the attachments.
func (e *AttachedError) Error() string {
	const most = 3
	var some []string
	for _, a := range e.Attached[:min(len(e.Attached), most)] {
		some = append(some, fmt.Sprintf("container %s in %s", policy.Shown(a.ContainerID), policy.Shown(a.File)))
	}
	if more := len(e.Attached) - len(some); more > 0 {
		some = append(some, fmt.Sprintf("%d more", more))
	}
	return fmt.Sprintf("the plugin stays, and with it rules and state: runtimes will call it for containers that they made with it (%s); "+
		"drain the node or wait with --wait, or, where the runtime ends containers by the conflist as it is then, as containerd does, use --no-wait",
		strings.Join(some, ", "))
}

// Step does what can be done now: it takes our entry out of the conflists, looks
// whether runtimes will still call the plugin, and if not removes it, and then
// rules and state. Once more is fine, and needed after an error, which after an
// AttachedError is what there is to wait for.
func (u Uninstall) Step(ctx context.Context) (Uninstalled, error) {
	var done Uninstalled
	var err error
	if err := u.withdraw(&done); err != nil {
		return done, err
	}
	if len(done.Conflists) > 0 {
		// ADDs under way go by the conflist as it was, and their outcome is cached
		// when they end.
		select {
		case <-ctx.Done():
			return done, ErrStopped
		case <-time.After(u.Settle):
		}
	}
	done.Attached, err = Attached(u.Root)
	if !u.NoWait {
		if err != nil {
			return done, fmt.Errorf("the plugin stays, as nobody knows whether runtimes will call it: %w; or use --no-wait", err)
		}
		if len(done.Attached) > 0 {
			return done, &AttachedError{done.Attached}
		}
	}
	// Somebody may have put an entry back meanwhile.
	if err := u.withdraw(&done); err != nil {
		return done, err
	}
	var errs []error
	for _, dir := range u.Bins {
		path, err := remove(ctx, dir)
		if err != nil {
			errs = append(errs, fmt.Errorf("remove the plugin from %s: %w", policy.Shown(dir), err))
		}
		if path != "" {
			done.Binaries = append(done.Binaries, path)
		}
	}
	if u.State != nil { // which nobody needs, as nobody calls the plugin
		errs = append(errs, u.State(ctx))
	}
	return done, errors.Join(errs...)
}

// withdraw takes our entry out of all conflists, and away what killed processes
// left beside them.
func (u Uninstall) withdraw(done *Uninstalled) error {
	var errs []error
	for _, dir := range u.Confs {
		if err := u.withdrawFrom(dir, done); err != nil {
			errs = append(errs, fmt.Errorf("take the entry out of the conflists in %s: %w; the plugin, rules and state stay until then", policy.Shown(dir), err))
		}
	}
	return errors.Join(errs...)
}

func (u Uninstall) withdrawFrom(dir string, done *Uninstalled) error {
	place := conflist.Place{Dir: dir, Backups: u.Backups}
	changes, err := place.Withdraw()
	done.Conflists = append(done.Conflists, changes...)
	if reason := err; err != nil && u.Backups != "" {
		// Where it is the backup that fails: pods that do not start are worse than a
		// file without one.
		place.Backups = ""
		if changes, err = place.Withdraw(); len(changes) > 0 {
			done.Conflists, done.NoBackup = append(done.Conflists, changes...), reason
		}
	}
	if err != nil {
		return err
	}
	if err = conflist.Sweep(dir); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
