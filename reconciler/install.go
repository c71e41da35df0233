// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/conflist"
	"github.com/ip-masq/ip-masq-cni/pkg/conflist/install"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

type installFlags struct {
	plugin, bootUnit             string
	noConflist, upgrade, replace bool
}

func (a *app) installCommand() *cobra.Command {
	var f installFlags
	c := &cobra.Command{
		Use:   "install",
		Short: "Install the plugin on this node, and its entry in the conflist",
		RunE:  func(c *cobra.Command, _ []string) error { return a.install(c.Context(), f) },
	}
	c.Flags().StringVar(&f.plugin, "plugin", "",
		"`FILE` of the plugin (default: ip-masq beside this program)")
	c.Flags().StringVar(&f.bootUnit, "boot-unit", "", "write the boot unit, which restores the rules before a "+
		"runtime starts, into `DIR`, such as "+install.UnitDirs()[0]+", and enable it")
	c.Flags().BoolVar(&f.noConflist, "no-conflist", false, "install the plugin only, and change no conflist")
	c.Flags().BoolVar(&f.replace, "replace", false, "replace a plugin entry that differs from "+
		"--conflist-entry-file, if pods can start with the new one")
	c.Flags().BoolVar(&f.upgrade, "upgrade", false,
		"replace the plugin in each directory that has it, and change nothing else")
	return c
}

type installation struct {
	ConfDir  string           `json:"cniConfDir"`
	BinDir   string           `json:"cniBinDir"`
	Plugin   install.Binary   `json:"plugin"`
	Conflist *conflist.Change `json:"conflist"` // null with --no-conflist, and where it failed
	BootUnit string           `json:"bootUnit,omitempty"`
	Warnings []string         `json:"warnings"`

	wroteUnit bool
}

func (a *app) directories() (install.Dirs, error) {
	s := config.DefaultSettings()
	s.CNIConfDir, s.CNIBinDir = "", ""
	s, err := a.settingsOver(s)
	file, mistake := config.ReadPluginFile(config.DefaultPluginFile)
	if s.CNIConfDir == "" && file.Present && mistake == nil {
		s.CNIConfDir = file.CNIConfDir
	}
	return install.Dirs{Conf: s.CNIConfDir, Bin: s.CNIBinDir}, err
}

func (a *app) install(ctx context.Context, f installFlags) error {
	node, err := a.node(ctx)
	stated, errDirs := a.directories()
	if err = cmp.Or(err, errDirs); err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil && f.plugin == "" {
		return fmt.Errorf("find the plugin beside this program: %w; name it with --plugin", err)
	}
	f.plugin = cmp.Or(f.plugin, filepath.Join(filepath.Dir(self), config.PluginType))
	if f.upgrade {
		return a.upgrade(ctx, f.plugin, stated)
	}
	dirs, err := install.Locate("/", stated)
	if err != nil {
		return err
	}
	s, located := node.Settings, node.Settings
	located.CNIConfDir = dirs.Conf
	// Another node than the first one: what it asks about the entry has to be about the located directory.
	editor := newEditor(located, open(located, node.Drivers))
	editor.Replace = f.replace
	var entryErr error
	if !f.noConflist {
		entryErr = findEntry(&editor, s)
		if err := stopsInstall(entryErr, editor, s); err != nil { // before anything is written
			return err
		}
	}
	binary, err := install.Copy(ctx, f.plugin, dirs.Bin)
	if err != nil {
		return remedied(err)
	}
	r := installation{ConfDir: dirs.Conf, BinDir: dirs.Bin, Plugin: binary, Warnings: dirWarnings(dirs, s)}
	if !f.noConflist {
		if entryErr == nil {
			entryErr = r.insert(ctx, editor, s)
		}
		err = r.reportEntryErr(entryErr, s)
	}
	r.installBootUnit(ctx, f.bootUnit, node.Dir)
	if a.json() {
		return errors.Join(err, a.print(r))
	}
	if err != nil && r.Conflist != nil && !r.Conflist.Wrote {
		r.Conflist = nil // the error says what is wrong with it
	}
	r.print(a)
	return err
}

// findEntry gives the editor the entry, and returns why it cannot be inserted now.
func findEntry(editor *conflist.Editor, s config.Settings) error {
	entry, fromFile, err := pluginEntry(s)
	editor.Entry, editor.FromFile = entry, fromFile
	if err != nil {
		return err
	}
	_, err = editor.Find()
	return err
}

// stopsInstall returns the error of the command if the entry cannot be inserted now. With conflist.manage it
// is none, as an init container must not wait for the main CNI plugin, which may start later.
func stopsInstall(entryErr error, editor conflist.Editor, s config.Settings) error {
	switch {
	case entryErr == nil && editor.Replace && !editor.FromFile:
		return fmt.Errorf("--replace: conflist.entry_file: %s is missing; write the entry into it",
			policy.Quote(s.Conflist.EntryFile))
	case entryErr == nil, s.Conflist.Manage:
		return nil
	case errors.Is(entryErr, conflist.ErrNoNetworks):
		return fmt.Errorf(`%w; nothing is installed: run install again then, or let "run" insert the entry `+
			`with --conflist-manage`, entryErr)
	}
	return remedied(entryErr)
}

func (a *app) upgrade(ctx context.Context, plugin string, stated install.Dirs) error {
	done := []installation{}
	var errs []error
	for _, dir := range install.AllDirs(stated).Bin {
		if _, err := os.Lstat(filepath.Join(dir, config.PluginType)); err != nil {
			continue
		}
		err := install.CheckDir("/", dir)
		if err != nil && stated.Bin == "" { // the programs in a stated one run anyway
			errs = append(errs, fmt.Errorf("the plugin in %s stays as it is: %w", policy.Printable(dir), err))
			continue
		}
		binary, err := install.Copy(ctx, plugin, dir)
		if err != nil {
			errs = append(errs, remedied(err))
			continue
		}
		done = append(done, installation{BinDir: dir, Plugin: binary, Warnings: []string{}})
	}
	if a.json() {
		return errors.Join(append(errs, a.print(done))...)
	}
	for _, r := range done {
		r.print(a)
	}
	return errors.Join(errs...)
}

// installBootUnit writes the boot unit into a directory; "" is none. What keeps it from that is a warning:
// the rules are restored without the unit, too, only later. A unit that is there already must name the
// dataDir.
func (r *installation) installBootUnit(ctx context.Context, dir string, state *store.Dir) {
	dataDir := state.Path()
	if dir == "" {
		path := install.FindBootUnit(state.BootUnitDir())
		if path != "" && !install.BootUnitMentions(path, dataDir) {
			r.warn("the boot unit %s does not name the data dir %s; run install again with --boot-unit %s",
				policy.Printable(path), policy.Printable(dataDir), install.UnitDirs()[0])
		}
		return
	}
	text, err := install.BootUnit(r.BinDir, dataDir)
	if err == nil {
		dir, err = filepath.Abs(dir)
	}
	if err == nil {
		r.wroteUnit, err = install.WriteBootUnit(ctx, dir, text)
	}
	if err != nil {
		r.warn("the boot unit is not installed: %v", remedied(err))
		return
	}
	r.BootUnit = filepath.Join(dir, install.BootUnitName)
	if dir == state.BootUnitDir() {
		return
	}
	err = state.RecordBootUnitDir(ctx, dir)
	if err != nil {
		r.warn("the directory of the boot unit is not on record, so uninstall may need --boot-unit %s: %v",
			policy.Printable(dir), remedied(err))
	}
}

func (r *installation) warn(format string, args ...any) {
	r.Warnings = append(r.Warnings, fmt.Sprintf(format, args...))
}

// insert inserts the entry. The error may be that the entry is there and every ADD fails.
func (r *installation) insert(ctx context.Context, e conflist.Editor, s config.Settings) error {
	c, err := e.Insert(ctx)
	switch {
	case err != nil && ctx.Err() != nil:
		return install.ErrStopped
	case err != nil:
		return remedied(err)
	}
	r.Conflist = &c
	if c.BackupErr != nil {
		r.warn("no backup is kept in the data dir, so it is beside the file: %v", c.BackupErr)
	} else if c.RecordErr != nil {
		r.warn("%v", c.RecordErr)
	}
	if c.NotExchanged != nil {
		r.warn("a write of another program in the same instant can be lost: %v", c.NotExchanged)
	}
	n, err := conflist.Find(e.Dir, e.Network)
	if err == nil && n.MultusErr != nil {
		r.warn("%v", n.MultusErr)
	}
	return r.checkEntries(c.Path, s)
}

// checkEntries returns why ADDs fail with the entry as it is in a conflist, and warns of plugins that
// masquerade.
func (r *installation) checkEntries(path string, s config.Settings) error {
	pluginFile, pluginFileErr := config.ReadPluginFile(config.DefaultPluginFile)
	doc, _, err := safefile.ReadFile(path, 1<<20)
	list := config.ParseConflist(path, doc)
	for _, i := range list.Masquerading() {
		r.warn(`%s: plugins[%d] (%s) has "ipMasq": true, so it masquerades what the policy exempts: `+
			`write false, or remove the key`, policy.Printable(list.File), i, policy.Quote(list.Types[i]))
	}
	errs := []error{pluginFileErr, err, list.VersionErr(), list.DataDirErr(pluginFile, s.DataDir)}
	for _, e := range list.Entries {
		if e.Err != nil {
			errs = append(errs, fmt.Errorf("no pod of network %s starts with the plugin entry as it is: %w",
				policy.Quote(list.Network), e.Err))
		}
	}
	return errors.Join(errs...)
}

// reportEntryErr returns why the entry was not inserted, or makes it a warning if "run" inserts the entry
// later.
func (r *installation) reportEntryErr(err error, s config.Settings) error {
	if err == nil {
		return nil
	}
	isInserted := r.Conflist != nil
	if !s.Conflist.Manage && isInserted {
		return err
	}
	if !s.Conflist.Manage {
		return fmt.Errorf("%w; the plugin is installed, its entry is not", err)
	}
	if !isInserted {
		err = fmt.Errorf(`%w; as conflist.manage is on, "run" inserts the entry when it can`, err)
	}
	r.Warnings = append(r.Warnings, err.Error())
	return nil
}

func dirWarnings(d install.Dirs, s config.Settings) []string {
	warnings := []string{}
	for _, dir := range []struct{ key, found, set string }{
		{"cni_conf_dir", d.Conf, s.CNIConfDir},
		{"cni_bin_dir", d.Bin, s.CNIBinDir},
	} {
		if dir.found != dir.set {
			warnings = append(warnings, fmt.Sprintf(`"run" needs this directory too: write %s = %s into %s`,
				dir.key, policy.Quote(dir.found), config.DefaultReconcilerFile))
		}
	}
	return warnings
}

func (r *installation) print(a *app) {
	warn(a, r.Warnings)
	say := func(format string, args ...any) { fmt.Fprintf(a.out, format+"\n", args...) }
	if r.Plugin.Wrote {
		say("installed %s (%s)", r.Plugin.Path, r.Plugin.Version)
	} else {
		say("%s (%s) is already installed", r.Plugin.Path, r.Plugin.Version)
	}
	if r.BootUnit != "" && r.wroteUnit {
		say("installed and enabled the boot unit %s", policy.Printable(r.BootUnit))
	} else if r.BootUnit != "" {
		say("the boot unit %s is already installed", policy.Printable(r.BootUnit))
	}
	if r.Conflist != nil {
		printChange(a, *r.Conflist)
	}
}

// printChange prints what became of the plugin entry.
func printChange(a *app, c conflist.Change) {
	say := func(format string, args ...any) { fmt.Fprintf(a.out, format+"\n", args...) }
	network, path := policy.Quote(c.Network), policy.Quote(c.Path)
	switch {
	case c.Wrote && c.Before == 0:
		say("inserted the plugin entry of network %s into %s", network, path)
	case c.Wrote && len(c.Replaced) > 0:
		say("replaced the plugin entry of network %s in %s; changed: %s",
			network, path, strings.Join(c.Replaced, ", "))
	case c.Wrote && c.Before == 1:
		say("updated the generated conflist of network %s, %s, as the original has changed", network, path)
	case !c.Wrote && len(c.Differs) == 0:
		say("network %s in %s already has the plugin entry, which install does not change", network, path)
	}
	if c.Wrote && c.Before > 1 {
		say("removed duplicate plugin entries of network %s from %s", network, path)
	}
	if len(c.Differs) > 0 {
		say("the plugin entry of network %s in %s stays; it differs from the entry file in %s: "+
			"install --replace replaces it", network, path, strings.Join(c.Differs, ", "))
	}
	if c.Removed != "" {
		say("removed %s, the copy that an earlier version made", policy.Quote(c.Removed))
	}
	if c.Backup != "" {
		say("kept the previous text as %s", policy.Quote(c.Backup))
	}
}

func newManager(s config.Settings, node *reconcile.Node, log *slog.Logger) *conflist.Manager {
	return &conflist.Manager{
		Editor: newEditor(s, node), BinDir: s.CNIBinDir, Log: log,
		ReadEntry: func() ([]byte, bool, error) { return pluginEntry(s) },
	}
}

// newEditor returns the Editor for the directory and the network of the settings, without an entry.
func newEditor(s config.Settings, node *reconcile.Node) conflist.Editor {
	return conflist.Editor{
		Dir:        s.CNIConfDir,
		Network:    s.Conflist.Network,
		Backups:    node.Dir.Backups,
		RecordPath: node.Dir.ConflistRecordPath(),
		CopyRecord: node.Dir.CopyRecordPath(),
		Check:      func(string) error { return checkNode(node.Dir) },
		Ask:        node.CheckEntry,
	}
}

// pluginEntry returns the content of conflist.entry_file, or an entry without a policy if the default file is
// missing, and whether it is the file's. It has to name the reconciler's dataDir, unless plugin.toml does.
func pluginEntry(s config.Settings) (entry []byte, fromFile bool, err error) {
	const key = "conflist.entry_file"
	pluginFile, err := config.ReadPluginFile(config.DefaultPluginFile)
	if err != nil {
		return nil, false, err
	}
	path := s.Conflist.EntryFile
	entry, err = conflist.ReadEntry(path)
	missing := errors.Is(err, fs.ErrNotExist)
	switch {
	case missing && path != config.DefaultEntryFile:
		return nil, false, fmt.Errorf("%s: %w; write the entry into it, or remove the key for an entry "+
			"without a policy", key, err)
	case missing:
		entry = fmt.Appendf(nil, `{"type":%q}`, config.PluginType)
		if !pluginFile.Present && s.DataDir != config.DefaultDataDir { // of letters, digits and a few marks
			entry = fmt.Appendf(nil, `{"type":%q,"dataDir":%q}`, config.PluginType, s.DataDir)
		}
		return entry, false, nil
	case err != nil:
		return nil, true, fmt.Errorf("%s: %w", key, err)
	}
	conf := config.ReadNetconf(entry)
	err = pluginFile.DataDirErr(conf)
	if dataDir := conf.Identity().DataDir; !pluginFile.Present && dataDir != s.DataDir {
		err = fmt.Errorf("dataDir: %s is not the data_dir of the reconciler; write %s into one of them, "+
			"as a node has one dataDir", policy.Quote(dataDir), policy.Quote(s.DataDir))
	}
	if err != nil {
		return nil, true, fmt.Errorf("%s: %s: %w", key, policy.Quote(path), err)
	}
	return entry, true, nil
}

// checkNode returns why the plugin would refuse all pods: plugin.toml is bad, or the dataDir is refused.
func checkNode(dir *store.Dir) error {
	_, err := config.ReadPluginFile(config.DefaultPluginFile)
	if err != nil {
		return err
	}
	err = checkDataDir(dir)
	if err != nil {
		return fmt.Errorf("no pod would start with the plugin entry: %w", err)
	}
	return nil
}

// checkDataDir returns why the plugin would refuse the dataDir. The plugin creates one that is missing, and
// need not write to it while the rules are correct.
func checkDataDir(dir *store.Dir) error {
	_, err := dir.Load()
	if err != nil {
		return err
	}
	now, cancel := context.WithCancel(context.Background())
	cancel() // another process may hold the lock, which is no reason
	lock, err := dir.LockToRead(now)
	if errors.Is(err, store.ErrRefused) {
		return err
	}
	return lock.Release()
}
