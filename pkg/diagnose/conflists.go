// SPDX-License-Identifier: Apache-2.0

package diagnose

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// list is a conflist that runtimes can load, with all of its plugins.
type list struct {
	config.Conflist
	plugins []plugin
}

// plugin is one plugin's configuration, its keys in lower case: plugins match
// them in any.
type plugin map[string]any

func (p plugin) kind() string {
	s, _ := p["type"].(string)
	return s
}

func (l list) ours() bool { return len(l.Entries) > 0 }

// readLists reads those of the conflists that the configuration directory was
// found to have and that parsed.
func (e *examination) readLists() error {
	var errs []error
	for _, c := range e.ConfDir.Conflists {
		if c.Err != nil {
			continue
		}
		l, err := readList(c)
		if err != nil {
			errs = append(errs, fmt.Errorf("read the plugins of %s: %w", policy.Quote(c.File), err))
			continue
		}
		e.lists = append(e.lists, l)
	}
	if e.ConfDirErr != nil && !errors.Is(e.ConfDirErr, fs.ErrNotExist) {
		errs = append(errs, e.ConfDirErr)
	}
	return errors.Join(errs...)
}

func readList(c config.Conflist) (list, error) {
	l := list{Conflist: c}
	doc, err := readPlugin(c.File)
	if err != nil {
		return l, err
	}
	if filepath.Ext(c.File) != ".conflist" {
		l.plugins = []plugin{doc}
		return l, nil
	}
	plugins, _ := doc["plugins"].([]any)
	for _, p := range plugins {
		if p, ok := p.(map[string]any); ok {
			l.plugins = append(l.plugins, p)
		}
	}
	// What a folder of the network's name adds (CNI spec 1.1).
	if inline, _ := doc["loadonlyinlinedplugins"].(bool); !inline && c.Network != "" {
		more, err := filepath.Glob(filepath.Join(filepath.Dir(c.File), c.Network, "*.conf"))
		if err != nil {
			return l, err
		}
		for _, file := range more {
			p, err := readPlugin(file)
			if err != nil {
				return l, err
			}
			l.plugins = append(l.plugins, p)
		}
	}
	return l, nil
}

func readPlugin(file string) (plugin, error) {
	data, err := readFile(file)
	if err != nil {
		return nil, err
	}
	var doc map[string]any
	if err := json.Unmarshal(data, &doc); err != nil {
		return nil, err
	}
	return lowerKeys(doc).(map[string]any), nil
}

// lowerKeys returns the value with the keys of all objects in lower case.
func lowerKeys(v any) any {
	switch v := v.(type) {
	case map[string]any:
		out := make(map[string]any, len(v))
		for k, item := range v {
			out[strings.ToLower(k)] = lowerKeys(item)
		}
		return out
	case []any:
		out := make([]any, len(v))
		for i, item := range v {
			out[i] = lowerKeys(item)
		}
		return out
	}
	return v
}

// mainPluginMasquerade looks for plugins beside ours that masquerade themselves.
func mainPluginMasquerade(e *examination) ([]Finding, error) {
	f := Finding{ID: "main-plugin-ipmasq", Severity: SeverityProblem,
		Summary: "Another plugin of our conflist masquerades too, whatever the policy leaves alone.",
		Remedy:  `Set "ipMasq": false there. Pods that are running keep their rules until they are made anew.`}
	flannel, err := e.flannelLeavesMasquerading()
	unseen := errors.Is(err, fs.ErrNotExist)
	if unseen {
		err = nil
	}
	for _, l := range e.lists {
		if !l.ours() {
			continue
		}
		for i, p := range l.plugins {
			if p.kind() == config.PluginType {
				continue
			}
			delegate, _ := p["delegate"].(map[string]any)
			_, stated := delegate["ipmasq"]
			switch {
			case masquerades(p):
				f.Detail = append(f.Detail, fmt.Sprintf(`%s: plugins[%d] (%s) has "ipMasq": true`, policy.Quote(l.File), i, policy.Quote(p.kind())))
			case p.kind() == "flannel" && unseen && !stated:
				err = errors.New("find out whether flannel's plugin has its delegate masquerade: /run/flannel/subnet.env does not exist: " +
					"flanneld has not run yet, or this is a container that does not mount the host's /run/flannel")
			case p.kind() == "flannel" && flannel && !stated:
				f.Detail = append(f.Detail, fmt.Sprintf(`%s: plugins[%d] (flannel) sets "ipMasq": true on its delegate, since flanneld does not masquerade; write "ipMasq": false into the delegate`,
					policy.Quote(l.File), i))
			}
		}
	}
	return []Finding{f}, err
}

// masquerades reports whether a configuration has ipMasq, or one that it
// delegates to.
func masquerades(p plugin) bool {
	if on, _ := p["ipmasq"].(bool); on {
		return true
	}
	for _, key := range []string{"delegate", "delegates"} {
		for _, inner := range objects(p[key]) {
			if masquerades(inner) {
				return true
			}
		}
	}
	return false
}

// objects returns an object, or those in a list.
func objects(v any) []plugin {
	switch v := v.(type) {
	case map[string]any:
		return []plugin{v}
	case []any:
		var all []plugin
		for _, item := range v {
			all = append(all, objects(item)...)
		}
		return all
	}
	return nil
}

// flannelLeavesMasquerading reports whether flannel's plugin finds that flanneld
// does not masquerade, and so asks its delegate to.
func (e *examination) flannelLeavesMasquerading() (bool, error) {
	text, err := readFile(e.path("run/flannel/subnet.env"))
	return slices.Contains(strings.Fields(string(text)), "FLANNEL_IPMASQ=false"), err
}

func duplicateEntries(e *examination) ([]Finding, error) {
	f := Finding{ID: "duplicate-entry", Severity: SeverityProblem,
		Summary: "A network has several entries of ours, of which each ADD puts one in the place of the other.",
		Remedy:  "Keep one entry in one conflist of the network."}
	where := map[string][]string{}
	var networks []string
	for _, c := range e.ConfDir.Conflists {
		for _, entry := range c.Entries {
			if where[c.Network] == nil {
				networks = append(networks, c.Network)
			}
			where[c.Network] = append(where[c.Network], fmt.Sprintf("%s plugins[%d]", policy.Quote(c.File), entry.Index))
		}
	}
	for _, network := range networks {
		if places := where[network]; len(places) > 1 {
			f.Detail = append(f.Detail, fmt.Sprintf("network %s: %s", policy.Quote(network), strings.Join(places, ", ")))
		}
	}
	return []Finding{f}, nil
}

// conflistErrors returns a finding with what is wrong with each conflist.
func (e *examination) conflistErrors(f Finding, wrong func(config.Conflist) error) ([]Finding, error) {
	for _, c := range e.ConfDir.Conflists {
		if err := wrong(c); err != nil {
			f.Detail = append(f.Detail, strings.Split(err.Error(), "\n")...)
		}
	}
	return []Finding{f}, nil
}

func refusedEntries(e *examination) ([]Finding, error) {
	return e.conflistErrors(Finding{ID: "entry-refused", Severity: SeverityProblem,
		Summary: "The plugin refuses an entry: no pod of the network can start.",
		Remedy:  "Mend what the message names.",
	}, func(c config.Conflist) error {
		var errs []error
		for _, entry := range c.Entries {
			errs = append(errs, entry.Err)
		}
		return errors.Join(errs...)
	})
}

func entryPositions(e *examination) ([]Finding, error) {
	return e.conflistErrors(Finding{ID: "entry-position", Severity: SeverityProblem,
		Summary: "No plugin stands before the plugin entry of a network: every ADD of it fails.",
		Remedy:  "Write the entry behind the plugin that makes the interface.",
	}, config.Conflist.PositionErr)
}

func otherDataDirs(e *examination) ([]Finding, error) {
	if e.DataDir == "" {
		return nil, nil
	}
	return e.conflistErrors(Finding{ID: "data-dir-differs", Severity: SeverityProblem,
		Summary: "A plugin entry has another dataDir than the reconciler, which is an error: a node has one.",
		Remedy:  "State the same dataDir in each entry and as data_dir in reconciler.toml, or data_dir in plugin.toml for all of them.",
	}, func(c config.Conflist) error { return c.DataDirErr(e.Guard, e.DataDir) })
}

func missingPlugin(e *examination) ([]Finding, error) {
	if e.BinDir == "" {
		return nil, nil
	}
	missing := config.CheckPlugin(e.BinDir)
	return e.conflistErrors(Finding{ID: "plugin-missing", Severity: SeverityProblem,
		Summary: "Runtimes cannot run the plugin that a conflist names: no pod of its network can start.",
		Remedy:  "ip-masq-reconciler install brings the plugin; or state the runtime's directory of plugins as cni_bin_dir.",
	}, func(c config.Conflist) error {
		if missing == nil || len(c.Entries) == 0 {
			return nil
		}
		return fmt.Errorf("%w; %s (network %s) names it", missing, policy.Quote(c.File), policy.Quote(c.Network))
	})
}

func brokenConflists(e *examination) ([]Finding, error) {
	return e.conflistErrors(Finding{ID: "conflist-broken", Severity: SeverityProblem,
		Summary: "Runtimes cannot load a file of the CNI configuration directory; while there is one, no network is dropped.",
		Remedy:  "Mend the file, or move it away.",
	}, func(c config.Conflist) error { return c.Err })
}

// conflistWithoutUs looks at the conflist that the runtime picks, the first by
// name. One that chooses among the others itself, or makes no interface to the
// outside, is passed over.
func conflistWithoutUs(e *examination) ([]Finding, error) {
	f := Finding{ID: "conflist-without-us", Severity: SeverityNotice,
		Summary: "The network that the runtime picks has no entry of ours: its pods start whether the rules are right or not.",
		Remedy:  "ip-masq-reconciler install adds the entry to that conflist; or give the one that has it a name that sorts first."}
	configured := slices.ContainsFunc(e.lists, list.ours) ||
		slices.ContainsFunc(e.State.Sources, func(c policy.Source) bool { return c.ID.Kind == policy.Network })
	if configured {
		f.Severity = SeverityProblem
	}
	first := e.runtimesList()
	switch {
	case e.ConfDirErr != nil && !errors.Is(e.ConfDirErr, fs.ErrNotExist):
		return nil, nil // nobody knows; it is said elsewhere
	case first == nil && len(e.ConfDir.Conflists) == 0:
		f.Summary = "There is no CNI configuration: no pod can start, and none would meet our plugin."
		f.Detail = []string{fmt.Sprintf("%s holds none", policy.Quote(e.ConfDir.Dir))}
	case first != nil && !first.ours():
		f.Detail = []string{fmt.Sprintf("%s (network %s)", policy.Quote(first.File), policy.Quote(first.Network))}
	}
	return []Finding{f}, nil
}

func (e *examination) runtimesList() *list {
	for i, l := range e.lists {
		passes := func(p plugin) bool { return config.IsMultus(p.kind()) || p.kind() == "loopback" }
		if !slices.ContainsFunc(l.plugins, func(p plugin) bool { return !passes(p) }) && !l.ours() {
			continue
		}
		return &e.lists[i]
	}
	return nil
}
