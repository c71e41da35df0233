// SPDX-License-Identifier: Apache-2.0

package install

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
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
	// Attached is why the plugin stays, or would have without NoWait; and Copies is why
	// it stays, with those that no runtime reads.
	Attached []Attachment
	Copies   []Copy
	// Missing says that there are attachments, and no plugin to keep for them.
	Missing bool
}

// AttachedError says that the plugin stays, since runtimes will call it: for the
// containers of attachments, or for each that is to start where there are copies.
type AttachedError struct {
	Attached []Attachment
	Copies   []Copy
	// Missing are the directories in which the plugin is not any more; nil where it is.
	Missing []string
}

// Error names some of the attachments, and the copies.
func (e *AttachedError) Error() string {
	var reasons []string
	if len(e.Copies) > 0 {
		stays := "the plugin stays, and with it rules and state, as no pod could start without it"
		if e.Missing != nil {
			stays = "rules and state stay; no pod can start, as the plugin is not in " + strings.Join(e.Missing, ", ")
		}
		reasons = append(reasons, stays+": "+copiesText(e.Copies))
	}
	if len(e.Attached) > 0 {
		reasons = append(reasons, "the plugin stays, and with it rules and state: "+attachedText(e.Attached))
	}
	return strings.Join(reasons, "; ")
}

func copiesText(copies []Copy) string {
	var all []string
	for _, group := range []struct {
		multus bool
		remedy string
	}{
		{true, "restart Multus on the node, so that it generates the file again (if it is not Multus that wrote the file, remove the plugin entry)"},
		{false, "remove the plugin entry, or restart the program that generates the file"},
	} {
		var files []string
		for _, c := range copies {
			if c.multus == group.multus {
				files = append(files, policy.Printable(c.File))
			}
		}
		if len(files) > 0 {
			all = append(all, strings.Join(files, ", ")+" names it: "+group.remedy)
		}
	}
	return strings.Join(all, "; ")
}

func attachedText(attached []Attachment) string {
	const most = 3
	var some []string
	for _, a := range attached[:min(len(attached), most)] {
		some = append(some, fmt.Sprintf("container %s in %s", policy.Printable(a.ContainerID), policy.Printable(a.File)))
	}
	if more := len(attached) - len(some); more > 0 {
		some = append(some, fmt.Sprintf("%d more", more))
	}
	noWait := "where the runtime ends containers by the conflist as it is then, as containerd does, use --no-wait"
	if slices.ContainsFunc(attached, Attachment.isMultus) {
		noWait = "as Multus ends containers by the conflist as it was when they started, let that fail once for each with --no-wait"
	}
	return fmt.Sprintf("runtimes will call it for containers that they made with it (%s); drain the node or wait with --wait, or, %s",
		strings.Join(some, ", "), noWait)
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
	here := slices.ContainsFunc(u.Bins, func(dir string) bool { return exists("", filepath.Join(dir, config.PluginType)) })
	done.Copies, err = copies(append(slices.Clone(u.Confs), filepath.Join(u.Root, multusDir)))
	if err != nil {
		return done, fmt.Errorf("the plugin stays, as a file that may name it cannot be read: %w", err)
	}
	var stays AttachedError
	if !here {
		stays.Missing = u.Bins
	}
	for _, c := range done.Copies {
		if c.Loaded {
			stays.Copies = append(stays.Copies, c)
		}
	}
	done.Attached, err = Attached(u.Root)
	done.Missing = !here && len(done.Attached) > 0
	if here && !u.NoWait { // or there is nothing that could stay for their end
		if err != nil {
			return done, fmt.Errorf("the plugin stays, as nobody knows whether runtimes will call it: %w; or use --no-wait", err)
		}
		stays.Attached = done.Attached
	}
	if len(stays.Copies)+len(stays.Attached) > 0 {
		return done, &stays
	}
	// Somebody may have put an entry back meanwhile.
	if err := u.withdraw(&done); err != nil {
		return done, err
	}
	var errs []error
	for _, dir := range u.Bins {
		path, err := remove(ctx, dir)
		if err != nil {
			errs = append(errs, fmt.Errorf("remove the plugin from %s: %w", policy.Printable(dir), err))
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
	var keep []string
	for _, dir := range u.Confs {
		keep = append(keep, conflist.MultusFiles(dir)...)
	}
	for _, dir := range u.Confs {
		if err := u.withdrawFrom(dir, keep, done); err != nil {
			errs = append(errs, fmt.Errorf("take the entry out of the conflists in %s: %w; the plugin, rules and state stay until then", policy.Printable(dir), err))
		}
	}
	return errors.Join(errs...)
}

func (u Uninstall) withdrawFrom(dir string, keep []string, done *Uninstalled) error {
	place := conflist.Place{Dir: dir, Backups: u.Backups, Keep: keep}
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
