// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/ip-masq/ip-masq-cni/e2e/policytest"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// write makes a file in a directory of its own, for its owner alone to write.
func write(t testing.TB, path, text string) string {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestReadPluginFile(t *testing.T) {
	for _, c := range []struct {
		name, text string
		want       PluginFile
	}{
		{"everything", "allow_networks = [\"podnet\", 'blue']\nallow_unlisted_networks = ['blue']\ndata_dir = \"/srv/masq//\"\ncni_conf_dir = \"/etc/k3s/cni/\"\n",
			PluginFile{AllowNetworks: []string{"podnet", "blue"}, AllowUnlisted: []string{"blue"}, DataDir: "/srv/masq", CNIConfDir: "/etc/k3s/cni"}},
		{"nothing", "# nothing yet\n", PluginFile{DataDir: "/var/lib/cni/ip-masq", CNIConfDir: "/etc/cni/net.d"}},
		{"nobody", "allow_networks = []", PluginFile{AllowNetworks: []string{}, DataDir: "/var/lib/cni/ip-masq", CNIConfDir: "/etc/cni/net.d"}},
		{"a byte order mark", "\xef\xbb\xbfallow_networks = ['podnet']",
			PluginFile{AllowNetworks: []string{"podnet"}, DataDir: "/var/lib/cni/ip-masq", CNIConfDir: "/etc/cni/net.d"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := write(t, filepath.Join(t.TempDir(), "plugin.toml"), c.text)
			link := filepath.Join(t.TempDir(), "link.toml")
			if err := os.Symlink(path, link); err != nil {
				t.Fatal(err)
			}
			for _, path := range []string{path, link} {
				got, err := ReadPluginFile(path)
				if err != nil {
					t.Fatal(err)
				}
				want := c.want
				want.Path, want.Present = path, true
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("(-want +got):\n%s", diff)
				}
			}
		})
	}
}

func TestNoPluginFile(t *testing.T) {
	for _, path := range []string{"plugin.toml", "no/such/directory/plugin.toml"} {
		path = filepath.Join(t.TempDir(), path)
		got, err := ReadPluginFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(PluginFile{Path: path, DataDir: DefaultDataDir, CNIConfDir: DefaultCNIConfDir}, got); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
		if err := got.Admits("anybody"); err != nil {
			t.Errorf("without a file a network is not admitted: %v", err)
		}
	}
}

func TestMistakesInPluginFile(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		{"\nallow_network = ['podnet']", "FILE:2: allow_network: is not a known key; did you mean allow_networks?"},
		{"\n\n[agent]\nmasqChain = 'A'", "FILE:3: agent: is not a known key; remove it"},
		{"allow_networks = '*'", `FILE:1: allow_networks: "*" is a string; write a list such as ["podnet"]`},
		{"allow_networks = [\n'a',\n'*']",
			"FILE:1: allow_networks[1]: * is not the name of a network; write letters, digits, '_', '.' and '-', the first a letter or a digit"},
		{"allow_networks = [1]", `FILE:1: allow_networks[0]: 1 is a number; write a string such as "podnet"`},
		{"allow_networks = [{a = [[nan]]}]", "FILE:1: allow_networks: holds a number that is not finite; write a finite one"},
		{"data_dir = 'state'", "FILE:1: data_dir: state is relative; write an absolute path such as /var/lib/cni/ip-masq"},
		{"data_dir = 'a'\ncni_conf_dir = 'b'", "FILE:1: data_dir: a is relative; write an absolute path such as /var/lib/cni/ip-masq; " +
			"FILE:2: cni_conf_dir: b is relative; write an absolute path such as /etc/cni/net.d"},
		{"data_dir = '/a'\ndata_dir = '/b'", "FILE:2: not TOML: Key 'data_dir' has already been defined."},
		{"allow_networks = [", "FILE:1: not TOML: unexpected EOF; expected value"},
		{strings.Repeat("#", 64<<10+1), "read FILE: larger than 64 KiB; repair it, or remove it to let every network contribute"},
	} {
		t.Run(c.text[:min(len(c.text), 40)], func(t *testing.T) {
			path := write(t, filepath.Join(t.TempDir(), "plugin.toml"), c.text)
			got, err := ReadPluginFile(path)
			policytest.WantError(t, err, path, c.want)
			if diff := cmp.Diff(PluginFile{Path: path, Present: true, Invalid: true, DataDir: DefaultDataDir, CNIConfDir: DefaultCNIConfDir}, got); diff != "" {
				t.Errorf("what a refused file stands for (-want +got):\n%s", diff)
			}
		})
	}
}

// What can be read of the directories holds for the verbs that must not fail.
func TestInvalidPluginFileDirectories(t *testing.T) {
	path := write(t, filepath.Join(t.TempDir(), "plugin.toml"), "allow_networks = ['podnet']\ndata_dir = '/srv/masq'\nbogus = 1")
	got, err := ReadPluginFile(path)
	policytest.WantError(t, err, path, "FILE:3: bogus: is not a known key; remove it")
	want := PluginFile{Path: path, Present: true, Invalid: true, DataDir: "/srv/masq", CNIConfDir: DefaultCNIConfDir}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestIrregularPluginFile(t *testing.T) {
	dir := t.TempDir()
	fifo := filepath.Join(dir, "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	dangling, loop := filepath.Join(dir, "dangling"), filepath.Join(dir, "loop")
	for link, target := range map[string]string{dangling: "gone", loop: "loop"} {
		if err := os.Symlink(target, link); err != nil {
			t.Fatal(err)
		}
	}
	below := filepath.Join(write(t, filepath.Join(dir, "file"), ""), "plugin.toml")
	for path, want := range map[string]string{
		dir:         "read FILE: not a regular file; repair it, or remove it to let every network contribute",
		fifo:        "read FILE: not a regular file; repair it, or remove it to let every network contribute",
		"/dev/null": "read FILE: not a regular file; repair it, or remove it to let every network contribute",
		dangling:    "open FILE: not a regular file: it is a symlink to what is not there; in a container, mount the directory it points to as well; repair it, or remove it to let every network contribute",
		loop:        "open FILE: too many levels of symbolic links; repair it, or remove it to let every network contribute",
		below:       "open FILE: not a directory; repair it, or remove it to let every network contribute",
	} {
		got, err := ReadPluginFile(path)
		policytest.WantError(t, err, path, want)
		if !got.Present || got.Admits("podnet") == nil {
			t.Errorf("%s: what cannot be read guards nothing: %+v", path, got)
		}
	}
}

func TestPluginFileMode(t *testing.T) {
	for mode, refused := range map[os.FileMode]bool{0o644: false, 0o600: false, 0o400: false, 0o755: false, 0o664: true, 0o646: true, 0o666: true} {
		path := write(t, filepath.Join(t.TempDir(), "plugin.toml"), "allow_networks = ['podnet']\ndata_dir = '/srv/masq'")
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
		got, err := ReadPluginFile(path)
		if !refused {
			if err != nil {
				t.Errorf("mode %o: %v", mode, err)
			}
			continue
		}
		policytest.WantError(t, err, path, fmt.Sprintf(
			"FILE can be written by others than its owner (mode %04o), who could lift what it forbids; chmod it to 0644", mode))
		if got.Admits("podnet") == nil || got.DataDir != DefaultDataDir {
			t.Errorf("mode %o: the file is believed: %+v", mode, got)
		}
	}
}

// ownedBy is what fstat says of somebody's file.
type ownedBy struct {
	fs.FileInfo
	uid uint32
}

func (o ownedBy) Sys() any { return &syscall.Stat_t{Uid: o.uid} }

func (o ownedBy) Mode() fs.FileMode { return 0o644 }

func TestPluginFileOwner(t *testing.T) {
	us := uint32(os.Geteuid())
	for uid, want := range map[uint32]string{
		0: "", us: "",
		us + 4711: fmt.Sprintf("FILE belongs to user %d, who could lift what it forbids; chown it to root", us+4711),
	} {
		err := checkOwner("/x/plugin.toml", ownedBy{uid: uid})
		if want != "" {
			policytest.WantError(t, err, "/x/plugin.toml", want)
		} else if err != nil {
			t.Errorf("user %d: %v", uid, err)
		}
	}
}

func TestAdmits(t *testing.T) {
	const path = "/etc/ip-masq/plugin.toml"
	for _, c := range []struct {
		file    PluginFile
		network string
		want    string
	}{
		{PluginFile{Path: path}, "podnet", ""},
		{PluginFile{Path: path, Present: true, AllowNetworks: []string{"blue", "podnet"}}, "podnet", ""},
		{PluginFile{Path: path, Present: true, AllowNetworks: []string{"blue"}}, "podnet",
			`network "podnet" may not contribute: it is not in allow_networks of FILE; add it there`},
		{PluginFile{Path: path, Present: true, AllowNetworks: []string{}}, "podnet",
			`network "podnet" may not contribute: it is not in allow_networks of FILE; add it there`},
		{PluginFile{Path: path, Present: true, AllowNetworks: []string{"podnet"}}, "Podnet",
			`network "Podnet" may not contribute: it is not in allow_networks of FILE; add it there`},
		{PluginFile{Path: path, Present: true, AllowNetworks: []string{"blue"}, AllowUnlisted: []string{"podnet"}}, "podnet",
			`network "podnet" may not contribute: it is in allow_unlisted_networks of FILE and not in allow_networks; add it there too`},
		{PluginFile{Path: path, Present: true}, "podnet",
			`network "podnet" may not contribute: FILE has no allow_networks, which allows no network; write allow_networks = ["podnet"] there`},
	} {
		err := c.file.Admits(c.network)
		if c.want != "" {
			policytest.WantError(t, err, path, c.want)
		} else if err != nil {
			t.Errorf("%+v: %v", c.file, err)
		}
	}
}

// Stored sources of networks that a file does not admit are not in force, and nothing that ADDs found is.
func TestInForce(t *testing.T) {
	found := policytest.Prefixes("10.1.0.0/16")
	network := func(name string) policy.SourceID { return policy.SourceID{Kind: policy.Network, Name: name} }
	agent := policy.SourceID{Kind: policy.AgentFiles}
	all := []policy.Source{{ID: network("evil"), PodSubnets: found}, {ID: network("podnet"), PodSubnets: found}, {ID: agent}}
	for _, c := range []struct {
		name              string
		file              PluginFile
		inForce, excluded []policy.Source
	}{
		{"no file", PluginFile{}, all, nil},
		{"one admitted", PluginFile{Present: true, AllowNetworks: []string{"podnet"}}, []policy.Source{{ID: network("podnet")}, {ID: agent}}, []policy.Source{{ID: network("evil")}}},
		{"none admitted", PluginFile{Present: true}, []policy.Source{{ID: agent}}, []policy.Source{{ID: network("evil")}, {ID: network("podnet")}}},
		{"invalid", PluginFile{Present: true, Invalid: true}, []policy.Source{{ID: network("evil")}, {ID: network("podnet")}, {ID: agent}}, nil},
	} {
		inForce, excluded := c.file.InForce(all)
		if diff := cmp.Diff(c.inForce, inForce, cmpopts.EquateComparable(netip.Prefix{})); diff != "" {
			t.Errorf("%s: in force (-want +got):\n%s", c.name, diff)
		}
		if diff := cmp.Diff(c.excluded, excluded, cmpopts.EquateComparable(netip.Prefix{})); diff != "" {
			t.Errorf("%s: excluded (-want +got):\n%s", c.name, diff)
		}
	}
	if len(all[0].PodSubnets) == 0 {
		t.Error("the stored sources were changed")
	}
}

// Whose word a network's policy is, where there is a plugin.toml.
func TestNetconfOfPluginFile(t *testing.T) {
	const list = `{"cniVersion": "1.0.0", "name": "%s", "plugins": [{"type": "bridge"}, {"type": "%s", "masqLinkLocal": true}]}`
	dir := confDir(t, map[string]string{
		"10-podnet.conflist": fmt.Sprintf(list, "podnet", "ip-masq"), "20-podnet.conflist": fmt.Sprintf(list, "podnet", "ip-masq"),
		"30-bare.conflist": fmt.Sprintf(list, "bare", "portmap"), "40-bad.conflist": strings.Replace(fmt.Sprintf(list, "bad", "ip-masq"), "masqLink", "link", 1),
	})
	broken := confDir(t, map[string]string{"10-podnet.conflist": fmt.Sprintf(list, "podnet", "ip-masq"), "20-x.conflist": "{"})
	missing := filepath.Join(dir, "missing")
	handed := ReadNetconf([]byte(`{"name": "x", "type": "ip-masq"}`))
	for _, c := range []struct {
		network, dir string
		unlisted     []string
		file, want   string
		unknown      bool
	}{
		{network: "podnet", dir: dir, file: "10-podnet.conflist"},
		{network: "podnet", dir: dir, unlisted: []string{"podnet"}, file: "10-podnet.conflist"},
		{network: "podnet", dir: broken, file: "10-podnet.conflist"},
		{network: "blue", dir: dir, unlisted: []string{"blue"}},
		{network: "blue", dir: broken, unlisted: []string{"blue"}},
		{network: "blue", dir: missing, unlisted: []string{"blue"}},
		{network: "blue", dir: dir, want: `network "blue" may not contribute: no conflist in DIR has its plugin entry, and FILE takes its policy from there; ` +
			"write one, correct cni_conf_dir, or add the network to allow_unlisted_networks"},
		{network: "", dir: dir, want: `network "" may not contribute: no conflist in DIR has its plugin entry, and FILE takes its policy from there; ` +
			"write one, correct cni_conf_dir, or add the network to allow_unlisted_networks"},
		{network: "bare", dir: dir, want: `network "bare" may not contribute: its conflist DIR/30-bare.conflist has no plugin entry, and FILE takes its policy from there; ` +
			"add the entry, or the network to allow_unlisted_networks"},
		{network: "bad", dir: dir, file: "40-bad.conflist", want: "DIR/40-bad.conflist: plugins[1]: linkLocal: is not a known key; remove it"},
		{network: "blue", dir: broken, unknown: true, want: `network "blue": its conflist cannot be read: DIR/20-x.conflist: configuration is not JSON: line 1, column 1: unexpected end of JSON input; repair it`},
		{network: "blue", dir: missing, unknown: true, want: `network "blue": its conflist cannot be read: read the CNI configuration directory DIR: no such file or directory; ` +
			"write the runtime's directory as cni_conf_dir into FILE"},
	} {
		confs, err := ReadConfDir(c.dir)
		p := PluginFile{Path: "/etc/ip-masq/plugin.toml", Present: true, AllowUnlisted: c.unlisted, CNIConfDir: c.dir}
		conf, file, err := p.Netconf(c.network, handed, confs, err)
		if c.want != "" {
			policytest.WantError(t, errors.New(strings.ReplaceAll(err.Error(), c.dir, "DIR")), p.Path, c.want)
		} else if err != nil {
			t.Errorf("%+v: %v", c, err)
		}
		if file != "" {
			file = filepath.Base(file)
		}
		if file != c.file || errors.Is(err, ErrConflistUnknown) != c.unknown {
			t.Errorf("%+v: %q, %v", c, file, err)
		}
		if got := conf.Differences(handed); c.want == "" && (len(got) > 0) != (c.file != "") {
			t.Errorf("%+v: differs in %q", c, got)
		}
	}
}

func TestDifferences(t *testing.T) {
	const conf = `{"name": "a", "cniVersion": "1.0.0", "type": "ip-masq", "dataDir": "/a", "masqChain": "A", "nonMasqueradeCIDRs": ["10.0.0.0/8", "10.1.0.0/16"], "prevResult": {}, "cni.dev/x": 1}`
	for other, want := range map[string][]string{
		conf: nil,
		`{"nonMasqueradeCIDRs":["10.0.0.0/8","10.1.0.0/16"],"masqChain":"A"}`:                              nil,
		`{"nonMasqueradeCIDRs": ["10.0.0.0/8"], "masqChain": "A"}`:                                         {"nonMasqueradeCIDRs"},
		`{"nonMasqueradeCIDRs": ["10.1.0.0/16", "10.0.0.0/8"], "masqChain": "B", "requireAgentConfig": 1}`: {"masqChain", "nonMasqueradeCIDRs", "requireAgentConfig"},
		`{"Masqchain": "A"}`: {"Masqchain", "masqChain", "nonMasqueradeCIDRs"},
		`[`:                  {"masqChain", "nonMasqueradeCIDRs"},
	} {
		a, b := ReadNetconf([]byte(conf)), ReadNetconf([]byte(other))
		if got, back := a.Differences(b), b.Differences(a); !slices.Equal(got, want) || !slices.Equal(back, want) {
			t.Errorf("%s differs in %q and %q, want %q", other, got, back, want)
		}
	}
}

func FuzzPluginFile(f *testing.F) {
	for _, doc := range []string{
		"", "allow_networks = ['podnet', \"bl\\u0075e\"]\ndata_dir = \"/srv/masq\"\ncni_conf_dir = \"/etc/cni\"\n",
		"allow_networks = [\n 1,\n]\ndata_dir = 1979-05-27\n[a.\"b c\"]\nx.y = inf\n[[q]]\n[[q]]\n", "a.b.c = 1\na.d = {e = 1}\n",
		"allow_networks = \"podnet\"\nallow-networks = 1\n\"\" = 2\n\"\\u0000\" = 3", "data_dir = '''\n/srv'''", "x = \xff", "\xef\xbb\xbfx=1",
	} {
		f.Add([]byte(doc))
	}
	f.Fuzz(func(t *testing.T, doc []byte) {
		if strings.Count(string(doc), ".")+strings.Count(string(doc), "{") > 200 {
			return // nesting takes the TOML decoder cubic time: a slow input is no finding
		}
		p := PluginFile{Path: "/etc/ip-masq/plugin.toml", Present: true, DataDir: DefaultDataDir, CNIConfDir: DefaultCNIConfDir}
		err := p.parse(doc)
		if !filepath.IsAbs(p.DataDir) || !filepath.IsAbs(p.CNIConfDir) {
			t.Errorf("relative directories: %q, %q", p.DataDir, p.CNIConfDir)
		}
		if err != nil {
			policytest.CheckMessage(t, err)
			if p.AllowNetworks != nil {
				t.Errorf("a refused file allows %q", p.AllowNetworks)
			}
			return
		}
		for _, n := range p.AllowNetworks {
			if err := p.Admits(n); err != nil {
				t.Errorf("allows %q and does not admit it: %v", n, err)
			}
		}
	})
}
