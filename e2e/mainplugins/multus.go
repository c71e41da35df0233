// SPDX-License-Identifier: Apache-2.0

package mainplugins

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"

	"github.com/containernetworking/cni/pkg/version"
)

// Multus imitates the program of Multus that writes its configuration from that of another main
// CNI plugin, its master, with --multus-conf-file=auto (k8snetworkplumbingwg/multus-cni@c943f9ffa2d6:cmd/thin_entrypoint/main.go,
// k8snetworkplumbingwg/multus-cni@528d4f150cdf:pkg/server/config/generator.go). It does not copy the white space of the original.
type Multus struct {
	Dir string // the configuration directory
	// Follows is --cleanup-config-on-exit=true of thin Multus: it follows changes of its master and
	// removes its files at exit.
	Follows bool
	// Thick is the daemon, which has the name of its master in its configuration instead of a copy.
	Thick bool
	// Master is the path of the master since the last Start or Tick.
	Master string

	hash    [sha256.Size]byte // of the master
	version string            // of the master at the start
}

// ErrExited says that Multus has ended, so that the kubelet restarts it.
var ErrExited = errors.New("Multus has ended")

// Start starts Multus as a new container does. It fails without a master that it can read.
func (m *Multus) Start() error {
	m.hash, m.version = [sha256.Size]byte{}, ""
	return m.generate()
}

// Stop ends Multus by SIGTERM. Thick Multus always removes its file.
func (m *Multus) Stop() error {
	if !m.Follows && !m.Thick {
		return nil
	}
	for _, name := range []string{"00-multus.conf", "00-multus.conflist"} {
		if err := os.Remove(filepath.Join(m.Dir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// Tick does what thin Multus with Follows does once a second, and thick Multus after an event of
// its master: it generates the file again if the master has changed. It waits for its master to come
// back if the master is gone, and does not choose another file. Thick Multus empties its file if it
// cannot read the master; thin Multus then ends.
func (m *Multus) Tick() error {
	if !m.Follows && !m.Thick {
		return nil
	}
	if _, err := os.Stat(m.Master); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	err := m.generate()
	switch {
	case err == nil:
		return nil
	case m.Thick:
		return os.WriteFile(m.thickFile(), nil, 0o600)
	}
	return errors.Join(fmt.Errorf("%w: %w", ErrExited, err), m.Stop())
}

// generate chooses the master and writes the configuration of Multus.
func (m *Multus) generate() error {
	if err := m.choose(); err != nil {
		return err
	}
	doc, err := os.ReadFile(m.Master)
	if err != nil {
		return err
	}
	hash := sha256.Sum256(doc)
	if hash == m.hash {
		return nil
	}
	m.hash = hash
	var master map[string]any
	if err := json.Unmarshal(doc, &master); err != nil {
		return fmt.Errorf("read the master: %w", err)
	}
	stated, _ := master["cniVersion"].(string)
	if stated == "" {
		return errors.New("the master states no cniVersion")
	}
	conf := map[string]any{"name": "multus-cni-network"}
	if capabilities := capabilitiesOf(master); len(capabilities) > 0 {
		conf["capabilities"] = capabilities
	}
	if m.Thick {
		conf["cniVersion"], conf["type"], conf["clusterNetwork"] = "0.3.1", "multus-shim", "/host"+m.Master
		text, err := json.Marshal(conf)
		if err != nil {
			return err
		}
		return os.WriteFile(m.thickFile(), text, 0o600)
	}
	if m.version != "" && m.version != stated {
		return fmt.Errorf("the cniVersion of Multus is %s, that of the master %s", m.version, stated)
	}
	m.version = stated
	conf["type"], conf["cniConf"] = "multus", "/host/etc/cni/multus/net.d"
	conf["kubeconfig"], conf["delegates"] = "/etc/cni/net.d/multus.d/multus.kubeconfig", []any{master}
	return m.write(conf)
}

func (m *Multus) thickFile() string { return filepath.Join(m.Dir, "00-multus.conf") }

// choose sets Master to the first file by name that Multus does not take for its own.
func (m *Multus) choose() error {
	own := "00-multus.conf"
	if m.Thick {
		own = "00-multus"
	}
	entries, err := os.ReadDir(m.Dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if ext := filepath.Ext(e.Name()); (ext == ".conf" || ext == ".conflist") && !strings.HasPrefix(e.Name(), own) {
			m.Master = filepath.Join(m.Dir, e.Name())
			return nil
		}
	}
	return errors.New("no master")
}

// capabilitiesOf returns the capabilities of a network's plugins.
func capabilitiesOf(network map[string]any) map[string]any {
	plugins, isList := network["plugins"].([]any)
	if !isList {
		plugins = []any{network}
	}
	all := map[string]any{}
	for _, p := range plugins {
		p, _ := p.(map[string]any)
		capabilities, _ := p["capabilities"].(map[string]any)
		maps.Copy(all, capabilities)
	}
	return all
}

// write writes the configuration of thin Multus: a list if the master has cniVersion 1.0.0 or later.
// Like Multus it does not truncate the file that it renames, which a killed one may have left.
func (m *Multus) write(conf map[string]any) error {
	file := "00-multus.conf"
	isList, err := version.GreaterThanOrEqualTo(m.version, "1.0.0")
	if err != nil {
		return err
	}
	top := conf
	if isList {
		file, top = "00-multus.conflist", map[string]any{"name": conf["name"], "plugins": []any{conf}}
		delete(conf, "name")
	}
	top["cniVersion"] = m.version
	text, err := json.MarshalIndent(top, "", "    ")
	if err != nil {
		return err
	}
	next := filepath.Join(m.Dir, "00-multus.conf.new")
	f, err := os.OpenFile(next, os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	return os.Rename(next, filepath.Join(m.Dir, file))
}
