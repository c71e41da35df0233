// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/conflist"
	"github.com/ip-masq/ip-masq-cni/pkg/conflist/install"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
)

type installFlags struct {
	plugin     string
	noConflist bool
}

func (a *app) installCommand() *cobra.Command {
	var f installFlags
	c := a.addOutput(&cobra.Command{
		Use:   "install",
		Short: "Put the plugin on this node: the binary, then the entry in the conflist",
		Long: `Copies the plugin to the directory from which the container runtime runs plugins, makes
sure that it runs there, and then adds its entry to the conflist of the network that the
runtime uses. What is there already is left as it is; the conflist as it was is kept in the
dataDir. It may be run beside "run", and again at any time: that is how to upgrade.

The directories are --cni-bin-dir and --cni-conf-dir. Where they are not given, they are
those that are on the node, if only one of these is: the usual ones, GKE's, k3s's,
microk8s's or OpenShift's.

The entry is what stands in conflist.entry_file. With conflist.manage, an entry that cannot
be added now, as on a node without a network yet, is left to "run" with a warning.

Exit codes: 0 the plugin is installed, 1 it is not, or its entry is not.`,
		Example: `  ip-masq-reconciler install
  ip-masq-reconciler install --cni-bin-dir /usr/lib/cni --conflist-network podnet
  ip-masq-reconciler install --no-conflist   # the entry is in the conflist by other means`,
		Args: noArguments,
		RunE: func(c *cobra.Command, _ []string) error { return a.install(c.Context(), f) },
	})
	c.Flags().StringVar(&f.plugin, "plugin", "", "`FILE` to install (default: ip-masq beside this program)")
	c.Flags().BoolVar(&f.noConflist, "no-conflist", false, "leave conflists alone")
	return c
}

// installation is what came of an install.
type installation struct {
	ConfDir  string          `json:"cniConfDir"`
	BinDir   string          `json:"cniBinDir"`
	Plugin   installedPlugin `json:"plugin"`
	Conflist *placedEntry    `json:"conflist"` // null where no entry was looked after
	Warnings []string        `json:"warnings"`
}

type installedPlugin struct {
	Path    string `json:"path"`
	Version string `json:"version"`
	Wrote   bool   `json:"wrote"`
}

type placedEntry struct {
	Network string `json:"network"`
	Path    string `json:"path"`
	Backup  string `json:"backup"`
	Wrote   bool   `json:"wrote"`

	had int // entries, before
}

// directories are those of the runtime that are stated, "" where they are not.
func (a *app) directories() (install.Dirs, error) {
	s := config.DefaultSettings()
	s.CNIConfDir, s.CNIBinDir = "", ""
	s, err := a.settingsOver(s)
	return install.Dirs{Conf: s.CNIConfDir, Bin: s.CNIBinDir}, err
}

func (a *app) install(ctx context.Context, f installFlags) error {
	s, err := a.settings()
	if err != nil {
		return err
	}
	i := install.Install{Plugin: f.plugin}
	if i.Plugin == "" {
		if i.Plugin, err = pluginBesideUs(); err != nil {
			return err
		}
	}
	stated, err := a.directories()
	if err != nil {
		return err
	}
	if i.Dirs, err = install.Locate("/", stated); err != nil {
		return err
	}
	r := installation{ConfDir: i.Dirs.Conf, BinDir: i.Dirs.Bin, Warnings: differing(i.Dirs, s)}
	var noEntry error
	if !f.noConflist {
		if noEntry = prepare(&i, s); noEntry != nil && !s.Conflist.Manage {
			return noEntry
		}
	}
	done, err := i.Run(ctx)
	var noBinary *install.BinaryError
	if errors.As(err, &noBinary) {
		return remedied(err)
	}
	r.Plugin = installedPlugin{done.Binary.Path, done.Binary.Version, done.Binary.Wrote}
	if err = remedied(errors.Join(noEntry, err)); err == nil && i.Place != nil {
		c := done.Conflist
		r.Conflist = &placedEntry{c.Network, c.Path, c.Backup, c.Wrote, c.Had}
		if n, e := conflist.Find(i.Dirs.Conf, s.Conflist.Network); e == nil && n.Multus.Err(n.Name) != nil {
			r.Warnings = append(r.Warnings, n.Multus.Err(n.Name).Error())
		}
		if err = entryErr(i.Dirs.Conf, c.Path, s); err != nil && s.Conflist.Manage {
			r.Warnings, err = append(r.Warnings, err.Error()), nil
		}
	}
	switch {
	case err != nil && r.Conflist != nil: // the entry is there
	case err != nil && s.Conflist.Manage:
		r.Warnings = append(r.Warnings, fmt.Sprintf(`%v; as conflist.manage is on, "run" adds the entry when it can`, err))
		err = nil
	case errors.Is(err, conflist.ErrNone):
		err = fmt.Errorf(`%w; the plugin is in place: add its entry by another install then, or let "run" do it with --conflist-manage`, err)
	case err != nil:
		err = fmt.Errorf("%w; the plugin is in place, its entry is not", err)
	}
	if a.json() {
		return errors.Join(err, a.print(r))
	}
	if err != nil && r.Conflist != nil && !r.Conflist.Wrote {
		r.Conflist = nil // what is wrong with it is told
	}
	r.tell(a)
	return err
}

// prepare says what entry is to be placed where.
func prepare(i *install.Install, s config.Settings) error {
	guard, err := config.ReadPluginFile(config.DefaultPluginFile)
	if err != nil {
		return err
	}
	entry, err := conflistEntry(s, guard)
	if err != nil {
		return err
	}
	node := reconcile.Open(s, config.DefaultPluginFile, nil)
	i.Place = &conflist.Place{Network: s.Conflist.Network, Entry: entry, Backups: node.Dir.BackupsPath(), Admits: admits(node.Dir)}
	return nil
}

// entryErr tells why every ADD of a network fails although its conflist has the plugin
// entry.
func entryErr(confDir, path string, s config.Settings) error {
	guard, guardErr := config.ReadPluginFile(config.DefaultPluginFile)
	dir, err := config.ReadConfDir(confDir)
	errs := []error{guardErr, err}
	for _, list := range dir.Conflists {
		for _, e := range list.Entries {
			if list.File == path && e.Err != nil {
				errs = append(errs, fmt.Errorf("no pod of network %s starts with the plugin entry as it is: %w", policy.Quote(list.Network), e.Err))
			}
		}
		if list.File == path {
			errs = append(errs, list.DataDirErr(guard, s.DataDir))
		}
	}
	return errors.Join(errs...)
}

// pluginBesideUs is the plugin as releases and images have it.
func pluginBesideUs() (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("find the plugin beside this program: %w; name it with --plugin", err)
	}
	return filepath.Join(filepath.Dir(self), config.PluginType), nil
}

// differing warns of directories that "run" would look for elsewhere.
func differing(d install.Dirs, s config.Settings) []string {
	warnings := []string{}
	for _, dir := range []struct{ key, found, set string }{
		{"cni_conf_dir", d.Conf, s.CNIConfDir}, {"cni_bin_dir", d.Bin, s.CNIBinDir},
	} {
		if dir.found != dir.set {
			warnings = append(warnings, fmt.Sprintf(`"run" has to be told too: write %s = %s into %s`,
				dir.key, policy.Quote(dir.found), config.DefaultReconcilerFile))
		}
	}
	return warnings
}

// tell tells people of it.
func (r *installation) tell(a *app) {
	for _, w := range r.Warnings {
		fmt.Fprintf(a.err, "warning: %s\n", w)
	}
	if r.Plugin.Wrote {
		fmt.Fprintf(a.out, "installed %s (%s)\n", r.Plugin.Path, r.Plugin.Version)
	}
	e := r.Conflist
	switch {
	case e != nil && e.Wrote:
		fmt.Fprintf(a.out, e.deed()+"\n", policy.Quote(e.Network), policy.Quote(e.Path))
		if e.Backup != "" {
			fmt.Fprintf(a.out, "the file as it was is kept as %s\n", policy.Quote(e.Backup))
		}
	case e != nil && !r.Plugin.Wrote:
		fmt.Fprintf(a.out, "nothing to do: %s (%s) is there, and network %s in %s has the entry\n",
			r.Plugin.Path, r.Plugin.Version, policy.Quote(e.Network), policy.Quote(e.Path))
	case e != nil:
		fmt.Fprintf(a.out, "network %s in %s has the entry already\n", policy.Quote(e.Network), policy.Quote(e.Path))
	case !r.Plugin.Wrote:
		fmt.Fprintf(a.out, "%s (%s) is there already\n", r.Plugin.Path, r.Plugin.Version)
	}
}

// deed is the format that says what was written.
func (e *placedEntry) deed() string {
	switch e.had {
	case 0:
		return "added the entry to network %s in %s"
	case 1:
		return "made network %s in %s anew, as the configuration that it was made of has changed; it has the entry still"
	}
	return "took from network %s in %s what it had more than one entry of ours"
}
