// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"debug/buildinfo"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/blakesmith/ar"
	"github.com/cavaliergopher/cpio"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
)

// programsIn returns the SHA-256 of the programs in an archive, package or image of a release, by ARCH/NAME,
// nil for another file.
func programsIn(file string) (map[string]string, error) {
	read := map[string]func([]byte, func(string, fs.FileMode, []byte) error) error{".deb": readDeb, ".rpm": readRPM, ".gz": readTarGz, ".tar": readImage}[filepath.Ext(file)]
	if read == nil {
		return nil, nil
	}
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	found := map[string]string{}
	return found, read(data, func(name string, _ fs.FileMode, data []byte) error {
		if programs()[path.Base(name)] == "" || !bytes.HasPrefix(data, []byte("\x7fELF")) {
			return nil
		}
		arch, err := architecture(data)
		if err != nil {
			return fmt.Errorf("%s: %w", printable(name), err)
		}
		id := arch + "/" + path.Base(name)
		if sum, known := found[id]; known && sum != sumOf(data) {
			return fmt.Errorf("has two programs %s", id)
		}
		found[id] = sumOf(data)
		return nil
	})
}

// architecture returns the GOARCH of a program, by its build info.
func architecture(program []byte) (string, error) {
	info, err := buildinfo.Read(bytes.NewReader(program))
	if err != nil {
		return "", err
	}
	for _, s := range info.Settings {
		if s.Key == "GOARCH" {
			return printable(s.Value), nil
		}
	}
	return "", errors.New("has no architecture in its build info")
}

// belongs reports whether a file may have these programs: an image those of all architectures, an archive or
// package those of the one in its name.
func belongs(file string, found, all map[string]string) bool {
	if isImage(file) {
		return len(found) == len(all)
	}
	for id := range found {
		arch, _, _ := strings.Cut(id, "/")
		rpm := cmp.Or(map[string]string{"amd64": "x86_64", "arm64": "aarch64"}[arch], arch)
		if !strings.Contains(file, "_"+arch+".") && !strings.Contains(file, "."+rpm+".rpm") {
			return false
		}
	}
	return len(found) == len(programs())
}

func isImage(name string) bool { return filepath.Ext(name) == ".tar" }

func readTarGz(data []byte, add func(string, fs.FileMode, []byte) error) error {
	zip, err := gzip.NewReader(bytes.NewReader(data))
	if err != nil {
		return err
	}
	return readTar(zip, add)
}

func readTar(in io.Reader, add func(string, fs.FileMode, []byte) error) error {
	archive := tar.NewReader(in)
	return readMembers(archive, func() (string, fs.FileMode, error) {
		h, err := archive.Next()
		if err != nil {
			return "", 0, err
		}
		return h.Name, h.FileInfo().Mode(), nil
	}, add)
}

// maxUnpacked is more than what the members of an archive have together.
const maxUnpacked = 256 << 20

// bounded is a reader that fails after so many bytes: the members of a small archive, which can be compressed
// and sparse, can have more than this machine's memory.
type bounded struct {
	io.Reader
	left int
}

func (b *bounded) Read(p []byte) (int, error) {
	n, err := b.Reader.Read(p)
	if b.left -= n; b.left < 0 {
		return 0, fmt.Errorf("unpacks to more than %d MiB", maxUnpacked>>20)
	}
	return n, err
}

// readMembers reads an archive until next returns io.EOF.
func readMembers(archive io.Reader, next func() (string, fs.FileMode, error), add func(string, fs.FileMode, []byte) error) error {
	archive = &bounded{archive, maxUnpacked}
	for {
		name, mode, err := next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		data, err := io.ReadAll(archive)
		if err != nil {
			return err
		}
		if err := add(name, mode, data); err != nil {
			return err
		}
	}
}

func readDeb(data []byte, add func(string, fs.FileMode, []byte) error) error {
	for archive := ar.NewReader(bytes.NewReader(data)); ; {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return errors.New("has no data.tar.gz")
		}
		if err != nil {
			return err
		}
		member, err := io.ReadAll(archive)
		if err != nil {
			return err
		}
		if strings.TrimSuffix(h.Name, "/") == "data.tar.gz" {
			return readTarGz(member, add)
		}
	}
}

func readRPM(data []byte, add func(string, fs.FileMode, []byte) error) error {
	payload, err := rpmPayload(data)
	if err != nil {
		return err
	}
	zip, err := gzip.NewReader(bytes.NewReader(payload))
	if err != nil {
		return err
	}
	archive := cpio.NewReader(zip)
	return readMembers(archive, func() (string, fs.FileMode, error) {
		h, err := archive.Next()
		if err != nil {
			return "", 0, err
		}
		return h.Name, h.FileInfo().Mode(), nil
	}, add)
}

// rpmPayload returns the payload of an .rpm. Before it are a lead of 96 bytes, the header of the
// signature, padded to 8 bytes, and the header: each 16 bytes, 16 bytes an entry, and the entries' data.
func rpmPayload(data []byte) ([]byte, error) {
	const lead, intro, entry = 96, 16, 16
	at := lead
	for range 2 {
		at += (8 - at%8) % 8
		if len(data) < at+intro || !bytes.HasPrefix(data[at:], []byte{0x8e, 0xad, 0xe8, 1}) {
			return nil, errors.New("is no .rpm")
		}
		at += intro + entry*int(binary.BigEndian.Uint32(data[at+8:])) + int(binary.BigEndian.Uint32(data[at+12:]))
	}
	return data[min(at, len(data)):], nil
}

// imageDigest returns the digest by which a registry knows the image of an OCI archive, whose index names nothing else.
func imageDigest(file string) (digest string, err error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}
	err = readTar(bytes.NewReader(data), func(name string, _ fs.FileMode, data []byte) error {
		if name != "index.json" {
			return nil
		}
		var index v1.Index
		if err := json.Unmarshal(data, &index); err != nil {
			return err
		}
		if len(index.Manifests) != 1 {
			return fmt.Errorf("index.json has %d images, want 1", len(index.Manifests))
		}
		digest = printable(string(index.Manifests[0].Digest))
		return nil
	})
	return digest, err
}

// readImage reads the layers of an OCI archive. Each blob must be what its name says.
func readImage(data []byte, add func(string, fs.FileMode, []byte) error) error {
	return readTar(bytes.NewReader(data), func(name string, mode fs.FileMode, data []byte) error {
		sum, isBlob := strings.CutPrefix(name, "blobs/sha256/")
		if !isBlob || mode.IsDir() {
			return nil
		}
		if sum != sumOf(data) {
			return fmt.Errorf("the blob %s has been changed", printable(sum))
		}
		if !bytes.HasPrefix(data, []byte{0x1f, 0x8b}) {
			return nil // JSON
		}
		return readTarGz(data, add)
	})
}
