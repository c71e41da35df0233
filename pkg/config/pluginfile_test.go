// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/policytest"
)

// write makes a file in a directory of its own, for its owner alone to write.
func write(t testing.TB, path, text string) string {
	t.Helper()
	assert.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
	assert.NoError(t, os.WriteFile(path, []byte(text), 0o644))
	return path
}

func TestReadPluginFile(t *testing.T) {
	for _, c := range []struct {
		name, text string
		want       PluginFile
	}{
		{"everything", "data_dir = \"/srv/masq//\"\ncni_conf_dir = \"/etc/k3s/cni/\"\n", PluginFile{DataDir: "/srv/masq", CNIConfDir: "/etc/k3s/cni"}},
		{"nothing", "# nothing yet\n", PluginFile{DataDir: "/var/lib/cni/ip-masq", CNIConfDir: "/etc/cni/net.d"}},
		{"a byte order mark", "\xef\xbb\xbfdata_dir = '/srv/masq'", PluginFile{DataDir: "/srv/masq", CNIConfDir: "/etc/cni/net.d"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := write(t, filepath.Join(t.TempDir(), "plugin.toml"), c.text)
			link := filepath.Join(t.TempDir(), "link.toml")
			assert.NoError(t, os.Symlink(path, link))
			for _, path := range []string{path, link} {
				got := assert.Must(ReadPluginFile(path))(t)
				want := c.want
				want.Path, want.Present = path, true
				assert.Equal(t, "got", got, want)
			}
		})
	}
}

func TestNoPluginFile(t *testing.T) {
	for _, path := range []string{"plugin.toml", "no/such/directory/plugin.toml"} {
		path = filepath.Join(t.TempDir(), path)
		got := assert.Must(ReadPluginFile(path))(t)
		assert.Equal(t, "got", got, PluginFile{Path: path, DataDir: DefaultDataDir, CNIConfDir: DefaultCNIConfDir})
	}
}

func TestMistakesInPluginFile(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		{"\ncni_confdir = '/etc/cni'", "FILE:2: cni_confdir: is not a known key; did you mean cni_conf_dir?"},
		{"allow_networks = ['podnet']", "FILE:1: allow_networks: is not a known key; remove it"},
		{"\n\n[agent]\nmasqChain = 'A'", "FILE:3: agent: is not a known key; remove it"},
		{"data_dir = [{a = [[nan]]}]", "FILE:1: data_dir: holds a number that is not finite; write a finite one"},
		{"data_dir = 'state'", "FILE:1: data_dir: state is relative; write an absolute path such as /var/lib/cni/ip-masq"},
		{"data_dir = 'a'\ncni_conf_dir = 'b'", "FILE:1: data_dir: a is relative; write an absolute path such as /var/lib/cni/ip-masq; " +
			"FILE:2: cni_conf_dir: b is relative; write an absolute path such as /etc/cni/net.d"},
		{"data_dir = '/a'\ndata_dir = '/b'", "FILE:2: not TOML: Key 'data_dir' has already been defined."},
		{"data_dir = [", "FILE:1: not TOML: unexpected EOF; expected value"},
		{strings.Repeat("#", 64<<10+1), "read FILE: larger than 64 KiB; repair it, or remove it to take policies from what the runtime hands over"},
	} {
		t.Run(c.text[:min(len(c.text), 40)], func(t *testing.T) {
			path := write(t, filepath.Join(t.TempDir(), "plugin.toml"), c.text)
			got, err := ReadPluginFile(path)
			policytest.WantError(t, err, path, c.want)
			assert.Equal(t, "what a refused file stands for", got, PluginFile{Path: path, Present: true, Invalid: true, DataDir: DefaultDataDir, CNIConfDir: DefaultCNIConfDir})
		})
	}
}

// What can be read of the directories holds for the verbs that must not fail.
func TestInvalidPluginFileDirectories(t *testing.T) {
	path := write(t, filepath.Join(t.TempDir(), "plugin.toml"), "data_dir = '/srv/masq'\nbogus = 1")
	got, err := ReadPluginFile(path)
	policytest.WantError(t, err, path, "FILE:2: bogus: is not a known key; remove it")
	want := PluginFile{Path: path, Present: true, Invalid: true, DataDir: "/srv/masq", CNIConfDir: DefaultCNIConfDir}
	assert.Equal(t, "got", got, want)
}

func TestIrregularPluginFile(t *testing.T) {
	dir := t.TempDir()
	fifo := filepath.Join(dir, "fifo")
	assert.NoError(t, syscall.Mkfifo(fifo, 0o600))
	dangling, loop := filepath.Join(dir, "dangling"), filepath.Join(dir, "loop")
	for link, target := range map[string]string{dangling: "gone", loop: "loop"} {
		assert.NoError(t, os.Symlink(target, link))
	}
	below := filepath.Join(write(t, filepath.Join(dir, "file"), ""), "plugin.toml")
	for path, want := range map[string]string{
		dir:         "read FILE: not a regular file; repair it, or remove it to take policies from what the runtime hands over",
		fifo:        "read FILE: not a regular file; repair it, or remove it to take policies from what the runtime hands over",
		"/dev/null": "read FILE: not a regular file; repair it, or remove it to take policies from what the runtime hands over",
		dangling:    "open FILE: not a regular file: it is a symlink to what is not there; in a container, mount the directory it points to as well; repair it, or remove it to take policies from what the runtime hands over",
		loop:        "open FILE: too many levels of symbolic links; repair it, or remove it to take policies from what the runtime hands over",
		below:       "open FILE: not a directory; repair it, or remove it to take policies from what the runtime hands over",
	} {
		got, err := ReadPluginFile(path)
		policytest.WantError(t, err, path, want)
		if !got.Present || !got.Invalid {
			t.Errorf("%s: what cannot be read guards nothing: %+v", path, got)
		}
	}
}

func TestPluginFileMode(t *testing.T) {
	for mode, refused := range map[os.FileMode]bool{0o644: false, 0o600: false, 0o400: false, 0o755: false, 0o664: true, 0o646: true, 0o666: true} {
		path := write(t, filepath.Join(t.TempDir(), "plugin.toml"), "data_dir = '/srv/masq'")
		assert.NoError(t, os.Chmod(path, mode))
		got, err := ReadPluginFile(path)
		if !refused {
			if err != nil {
				t.Errorf("mode %o: %v", mode, err)
			}
			continue
		}
		policytest.WantError(t, err, path, fmt.Sprintf(
			"FILE can be written by others than its owner (mode %04o), who could lift what it forbids; chmod it to 0644", mode))
		if !got.Invalid || got.DataDir != DefaultDataDir {
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

// Whose word a network's policy is, where there is a plugin.toml.
func TestNetconfOfPluginFile(t *testing.T) {
	const list = `{"cniVersion": "1.0.0", "name": "%s", "plugins": [{"type": "bridge"}, {"type": "%s", "masqLinkLocal": true}]}`
	dir := confDir(t, map[string]string{
		"10-podnet.conflist": fmt.Sprintf(list, "podnet", "ip-masq"), "20-podnet.conflist": fmt.Sprintf(list, "podnet", "ip-masq"),
		"30-bare.conflist": fmt.Sprintf(list, "bare", "portmap"), "40-bad.conflist": strings.Replace(fmt.Sprintf(list, "bad", "ip-masq"), "masqLink", "link", 1),
		"50-moved.conflist": strings.Replace(fmt.Sprintf(list, "moved", "ip-masq"), `"masqLink`, `"dataDir": "/b", "masqLink`, 1),
		"60-same.conflist":  strings.Replace(fmt.Sprintf(list, "same", "ip-masq"), `"masqLink`, `"dataDir": "/a/", "masqLink`, 1),
	})
	bare, masq := fmt.Sprintf(list, "podnet", "portmap"), fmt.Sprintf(list, "podnet", "ip-masq")
	broken := confDir(t, map[string]string{"10-podnet.conflist": masq, "20-x.conflist": "{"})
	second := confDir(t, map[string]string{"10-podnet.conflist": bare, "20-podnet.conflist": masq})
	repaired := confDir(t, map[string]string{"10-podnet.conflist": "{", "20-podnet.conflist": masq})
	missing := filepath.Join(dir, "missing")
	for _, c := range []struct {
		network, dir string
		file, want   string
		unknown      bool
	}{
		{network: "podnet", dir: dir, file: "10-podnet.conflist"},
		{network: "podnet", dir: broken, file: "10-podnet.conflist"},
		{network: "podnet", dir: repaired, file: "20-podnet.conflist"},
		{network: "podnet", dir: second, want: `network "podnet" has no policy: its conflist DIR/10-podnet.conflist has no plugin entry, and FILE takes it from there; add the entry`},
		{network: "blue", dir: dir, want: `network "blue" has no policy: no conflist in DIR has its plugin entry, and FILE takes it from there; write one, or correct cni_conf_dir`},
		{network: "", dir: dir, want: `network "" has no policy: no conflist in DIR has its plugin entry, and FILE takes it from there; write one, or correct cni_conf_dir`},
		{network: "bare", dir: dir, want: `network "bare" has no policy: its conflist DIR/30-bare.conflist has no plugin entry, and FILE takes it from there; add the entry`},
		{network: "bad", dir: dir, file: "40-bad.conflist", want: "DIR/40-bad.conflist: plugins[1]: linkLocal: is not a known key; remove it"},
		{network: "moved", dir: dir, file: "50-moved.conflist", want: `DIR/50-moved.conflist: plugins[1]: dataDir: "/b" is not the data_dir of FILE, "/a", which is that of the node; remove the key`},
		{network: "same", dir: dir, file: "60-same.conflist"},
		{network: "blue", dir: broken, unknown: true, want: `network "blue": its conflist cannot be read: DIR/20-x.conflist: configuration is not JSON: line 1, column 1: unexpected end of JSON input; repair it`},
		{network: "blue", dir: missing, unknown: true, want: `network "blue": its conflist cannot be read: read the CNI configuration directory DIR: no such file or directory; ` +
			"write the runtime's directory as cni_conf_dir into FILE"},
	} {
		confs, err := ReadConfDir(c.dir)
		p := PluginFile{Path: "/etc/ip-masq/plugin.toml", Present: true, DataDir: "/a", CNIConfDir: c.dir}
		conf, file, err := p.Netconf(c.network, confs, err)
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
		if c.want == "" && conf.Value("masqLinkLocal") == nil {
			t.Errorf("%+v: the entry is %v", c, conf.Statements())
		}
	}
}

func TestDifferences(t *testing.T) {
	const conf = `{"name": "a", "cniVersion": "1.0.0", "type": "ip-masq", "dataDir": "/a", "masqChain": "A", "nonMasqueradeCIDRs": ["10.0.0.0/8", "10.1.0.0/16"], "prevResult": {}, "cni.dev/x": 1}`
	for other, want := range map[string][]string{
		conf: nil,
		`{"nonMasqueradeCIDRs":["10.0.0.0/8","10.1.0.0/16"],"dataDir":"/a","masqChain":"A"}`:               nil,
		`{"nonMasqueradeCIDRs": ["10.0.0.0/8"], "dataDir": "/a", "masqChain": "A"}`:                        {"nonMasqueradeCIDRs"},
		`{"nonMasqueradeCIDRs": ["10.1.0.0/16", "10.0.0.0/8"], "masqChain": "B", "requireAgentConfig": 1}`: {"dataDir", "masqChain", "nonMasqueradeCIDRs", "requireAgentConfig"},
		`{"Masqchain": "A"}`: {"Masqchain", "dataDir", "masqChain", "nonMasqueradeCIDRs"},
		`[`:                  {"dataDir", "masqChain", "nonMasqueradeCIDRs"},
	} {
		a, b := ReadNetconf([]byte(conf)), ReadNetconf([]byte(other))
		if got, back := a.Differences(b), b.Differences(a); !slices.Equal(got, want) || !slices.Equal(back, want) {
			t.Errorf("%s differs in %q and %q, want %q", other, got, back, want)
		}
	}
}

func FuzzPluginFile(f *testing.F) {
	for _, doc := range []string{
		"", "data_dir = \"/srv/masq\"\ncni_conf_dir = \"/etc/cni\"\n",
		"cni_conf_dir = [\n 1,\n]\ndata_dir = 1979-05-27\n[a.\"b c\"]\nx.y = inf\n[[q]]\n[[q]]\n", "a.b.c = 1\na.d = {e = 1}\n",
		"data_dir = \"podnet\"\ndata-dir = 1\n\"\" = 2\n\"\\u0000\" = 3", "data_dir = '''\n/srv'''", "x = \xff", "\xef\xbb\xbfx=1",
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
		}
	})
}
