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

// Uninstall describes what to remove from a node.
type Uninstall struct {
	SearchDirs
	// Backups is the same as in conflist.Editor.
	Backups func() (string, error)
	// OwnRecordPath is the same as in conflist.Editor.
	OwnRecordPath string
	// Root is "/", below which runtimes and Multus keep their cached results.
	Root string
	// NoWait removes the plugin although the DEL of cached results may call it.
	NoWait bool
	// AddTime is how long an ADD already started may still run.
	AddTime time.Duration
	// RemoveState removes rules and state once the plugin is removed; nil leaves them. It may be
	// called again.
	RemoveState func(context.Context) error
}

// Uninstalled is what one Step removed.
type Uninstalled struct {
	Conflists []conflist.Change
	Binaries  []string // paths
	// Attached and References are why the plugin stays, or would stay without NoWait.
	Attached   []CachedResult
	References []string // paths
}

// InUseError reports that the plugin stays because it will be called: for the DEL of cached results, or for each new
// container if a configuration refers to it.
type InUseError struct {
	Attached   []CachedResult
	References []string
}

// Error says what stays and why, with a line for each remedy. It names some of the cached results, and all references.
func (e *InUseError) Error() string {
	var reasons []string
	if len(e.References) > 0 {
		reasons = append(reasons, referencesText(e.References))
	}
	if len(e.Attached) > 0 {
		reasons = append(reasons, attachedText(e.Attached))
	}
	return strings.Join(reasons, "\n")
}

func referencesText(references []string) string {
	var files []string
	for _, r := range references {
		files = append(files, policy.Printable(r))
	}
	return "the plugin stays, with rules and state: no pod could start without it, as it is named in " + strings.Join(files, ", ") +
		"\n  If Multus generates the file, restart Multus on the node, and remove the file if it is still there then." +
		"\n  Otherwise restart the program that generates the file, or remove the plugin entry. --no-wait does not help."
}

func attachedText(attached []CachedResult) string {
	const maxNamed = 3
	var names []string
	for _, a := range attached {
		names = append(names, fmt.Sprintf("container %s in %s", policy.Printable(a.ContainerID), policy.Printable(a.File)))
	}
	return "the plugin stays, with rules and state: a runtime will call it to tear down " + strings.Join(policy.First(maxNamed, names), ", ") +
		"\n  --wait TIME waits until these containers have ended. To end them, drain the node." +
		"\n  --no-wait removes all now. Use it with containerd, which does not need the plugin; the DEL of each pod of Multus fails once."
}

// Step removes what can be removed now: the plugin entries from the conflists; then, unless runtimes
// will still call it, the plugin; then rules and state. It may be called again, and after an error
// it has to be. After an InUseError the caller may wait.
func (u Uninstall) Step(ctx context.Context) (Uninstalled, error) {
	var done Uninstalled
	if err := u.removeEntries(&done); err != nil {
		return done, err
	}
	if len(done.Conflists) > 0 {
		// An ADD in progress uses the previous conflist; libcni caches it when the ADD returns.
		select {
		case <-ctx.Done():
			return done, ErrStopped
		case <-time.After(u.AddTime):
		}
	}
	if err := u.inUse(&done); err != nil {
		return done, err
	}
	// Another program may have inserted an entry meanwhile.
	if err := u.removeEntries(&done); err != nil {
		return done, err
	}
	var errs []error
	for _, dir := range u.Bin {
		path, err := remove(ctx, dir)
		if err != nil {
			errs = append(errs, fmt.Errorf("remove the plugin from %s: %w", policy.Printable(dir), err))
		}
		if path != "" {
			done.Binaries = append(done.Binaries, path)
		}
	}
	if u.RemoveState != nil {
		errs = append(errs, u.RemoveState(ctx))
	}
	return done, errors.Join(errs...)
}

// inUse returns why the plugin has to stay.
func (u Uninstall) inUse(done *Uninstalled) (err error) {
	present := slices.ContainsFunc(u.Bin, func(dir string) bool { return exists(dir, config.PluginType) })
	done.References, err = references(append(slices.Clone(u.Conf), filepath.Join(u.Root, multusDir)))
	if err != nil {
		return fmt.Errorf("the plugin stays, as a file that may name it cannot be read: %w", err)
	}
	stays := InUseError{References: done.References}
	done.Attached, err = cachedResults(u.Root)
	if present && !u.NoWait {
		if err != nil {
			return fmt.Errorf("the plugin stays, as it is unknown whether runtimes will call it: %w; or use --no-wait", err)
		}
		stays.Attached = done.Attached
	}
	if len(stays.References)+len(stays.Attached) > 0 {
		return &stays
	}
	return nil
}

// removeEntries removes the plugin entry from all conflists, and temporary files of killed processes.
func (u Uninstall) removeEntries(done *Uninstalled) error {
	var errs []error
	var keep []string
	for _, dir := range u.Conf {
		keep = append(keep, conflist.MultusFiles(dir)...)
	}
	for _, dir := range u.Conf {
		changes, err := conflist.Editor{Dir: dir, Backups: u.Backups, OwnRecordPath: u.OwnRecordPath, Keep: keep}.Remove()
		done.Conflists = append(done.Conflists, changes...)
		if err == nil {
			if err = conflist.RemoveTemps(dir); errors.Is(err, fs.ErrNotExist) {
				err = nil
			}
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("remove the plugin entry from the conflists in %s: %w; the plugin, rules and state stay until then",
				policy.Printable(dir), err))
		}
	}
	return errors.Join(errs...)
}
